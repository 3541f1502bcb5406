/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider over a double of its library: what travels, and how it is cut. */
#define _GNU_SOURCE
#include "verbs_pair.h"

static void test_there_and_back(void)
{
    pair_t p;
    open_pair(&p);
    good(&p, 1);
    memset(here, 0, 4096);
    CHECK_EQ(post_at(&p, HX_READ, 2, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK(!memcmp(here, there, 4096));
    close_pair(&p);
}

int main(void)
{
    static const case_t cases[] = {
        {"there and back", test_there_and_back},
    };
    return run_cases("test_verbs", cases, sizeof cases / sizeof cases[0]);
}
