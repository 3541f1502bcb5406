/* SPDX-License-Identifier: Apache-2.0 */
/* The revoked set against a model that remembers every byte. */
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "check.h"
#include "core.h"

enum { REGIONS = 3, NBYTES = 96, STEPS = 2000, EPOCHS = 1 << 16 };

/* For each byte: the newest revocation, and whether it is in force. */
static struct {
    uint64_t seq;
    bool sticky;
} model[REGIONS][NBYTES];

static bool model_hits(uint64_t region, uint64_t off, uint64_t end, uint64_t epoch)
{
    for (uint64_t i = off; i < end; i++)
        if (model[region][i].sticky || model[region][i].seq > epoch)
            return true;
    return false;
}

static size_t draw_spans(uint64_t *random, uint64_t spans[8])
{
    size_t n = 1 + draw_below(random, 4);
    for (size_t i = 0; i < n; i++) {
        spans[2 * i] = draw_below(random, NBYTES);
        spans[2 * i + 1] = 1 + draw_below(random, (NBYTES - spans[2 * i]) / (1 + draw_below(random, 8)) + 1);
        if (spans[2 * i] + spans[2 * i + 1] > NBYTES)
            spans[2 * i + 1] = NBYTES - spans[2 * i];
    }
    return n;
}

static void test_model(uint64_t seed)
{
    hx_revoked_set_t set = {0};
    uint64_t random = seed, seq = 0, spans[8];
    memset(model, 0, sizeof model);
    hx_revoked_init(&set);
    CHECK(!hx_revoked_hits(&set, 0, 0, NBYTES, 0));
    for (int step = 0; step < STEPS; step++) {
        uint64_t region = draw_below(&random, REGIONS);
        size_t n = draw_spans(&random, spans);
        bool revoke = draw_below(&random, 2);
        if (revoke) {
            CHECK(hx_revoked_add(&set, region, spans, n, ++seq));
            CHECK_EQ(atomic_load(&set.applied), seq);
        } else {
            hx_revoked_grant(&set, region, spans, n);
        }
        for (size_t k = 0; k < n; k++)
            for (uint64_t i = spans[2 * k]; i < spans[2 * k] + spans[2 * k + 1]; i++) {
                model[region][i].sticky = revoke;
                if (revoke)
                    model[region][i].seq = seq;
            }
        bool sticky = false;
        for (size_t r = 0; r < REGIONS; r++, sticky = false) {
            for (size_t i = 0; i < NBYTES; i++)
                sticky |= model[r][i].sticky;
            CHECK_EQ(atomic_load(&set.lists[r].n_sticky) > 0, sticky); /* few regions: each has a list of its own */
        }
        for (int probe = 0; probe < 10; probe++) {
            uint64_t r = draw_below(&random, REGIONS), off = draw_below(&random, NBYTES);
            uint64_t end = off + 1 + draw_below(&random, probe % 2 ? 4 : NBYTES - off);
            uint64_t epoch =
                probe % 3 ? seq - draw_below(&random, seq < 20 ? seq + 1 : 20) : draw_below(&random, seq + 1);
            end = end > NBYTES ? NBYTES : end;
            bool want = model_hits(r, off, end, epoch), got = hx_revoked_hits(&set, r, off, end, epoch);
            CHECK_EQ(got, want);
        }
    }
    CHECK(set.n_spans <= REGIONS * NBYTES); /* what was granted again does not pile up for ever */
    hx_revoked_free(&set);
}

enum { LONG = 4000 };

static void test_pruning(void)
{
    hx_revoked_set_t set = {0};
    uint64_t span[2] = {0, 10}, other[2] = {500, 10};
    hx_revoked_init(&set);
    CHECK(hx_revoked_add(&set, 9, other, 1, 1)); /* stays revoked through everything */
    for (uint64_t seq = 2; seq <= LONG; seq++) {
        CHECK(hx_revoked_add(&set, 1, span, 1, seq));
        CHECK(hx_revoked_hits(&set, 1, 9, 10, HX_EPOCH_NOW));
        hx_revoked_grant(&set, 1, span, 1);
        CHECK(!hx_revoked_hits(&set, 1, 9, 10, seq));
        CHECK(hx_revoked_hits(&set, 1, 9, 10, seq - 1));
    }
    CHECK_EQ(set.n_spans, 2);
    CHECK(hx_revoked_hits(&set, 9, 500, 501, HX_EPOCH_NOW));
    CHECK(!hx_revoked_hits(&set, 9, 510, 511, LONG));
    CHECK(!hx_revoked_hits(&set, 9, 510, 511, 1)); /* what others lost and got back is no reason to refuse this */
    CHECK(hx_revoked_hits(&set, 1, 0, 1, 1));      /* however long ago it was */
    hx_revoked_free(&set);
}

static void test_edges(void)
{
    hx_revoked_set_t set = {0};
    uint64_t huge[2] = {INT64_MAX, INT64_MAX}, none[2] = {50, 0}, middle[2] = {40, 10}, all[2] = {0, 100};
    hx_revoked_init(&set);
    CHECK(hx_revoked_add(&set, 1, huge, 1, 1));
    CHECK(!hx_revoked_hits(&set, 1, 0, INT64_MAX, HX_EPOCH_NOW));
    CHECK(hx_revoked_hits(&set, 1, INT64_MAX, UINT64_MAX - 1, HX_EPOCH_NOW));
    CHECK(hx_revoked_add(&set, 2, none, 0, 2)); /* a revocation of nothing still counts */
    CHECK_EQ(atomic_load(&set.applied), 2);
    CHECK(hx_revoked_add(&set, 2, all, 1, 3));
    hx_revoked_grant(&set, 2, middle, 1);
    CHECK(!hx_revoked_hits(&set, 2, 40, 50, 3));
    CHECK(hx_revoked_hits(&set, 2, 39, 41, 3) && hx_revoked_hits(&set, 2, 49, 51, 3));
    CHECK(hx_revoked_hits(&set, 2, 40, 50, 2)); /* a permission from before the revocation is not given back */
    CHECK(!hx_revoked_hits(&set, 2, 45, 45, HX_EPOCH_NOW));
    hx_revoked_grant(&set, 2, all, 1);
    CHECK(!hx_revoked_hits(&set, 2, 0, 100, 3));
    /* A region that is gone leaves nothing behind, and takes nothing of another in the same list with it. */
    CHECK(hx_revoked_add(&set, 2 + HX_REVOKED_LISTS, all, 1, 4) && hx_revoked_add(&set, 2, all, 1, 5));
    hx_revoked_forget(&set, 2);
    CHECK(!hx_revoked_hits(&set, 2, 0, 100, 0) && hx_revoked_hits(&set, 2 + HX_REVOKED_LISTS, 0, 100, 5));
    hx_revoked_forget(&set, 2 + HX_REVOKED_LISTS);
    hx_revoked_forget(&set, 1);
    CHECK_EQ(set.n_spans, 0);
    hx_revoked_free(&set);
}

/* ---- readers beside the one writer ---- */

enum { READERS = 2, TURNS = 5000 };

static struct {
    hx_revoked_set_t set;
    _Atomic uint64_t revoked, granting; /* turn that is surely in force; turn whose grant may have begun */
    _Atomic bool over;
} race;

static void *look(void *arg)
{
    (void)arg;
    while (!atomic_load(&race.over)) {
        uint64_t turn = atomic_load(&race.revoked), applied = atomic_load(&race.set.applied);
        bool hit = hx_revoked_hits(&race.set, 1, 0, 10, HX_EPOCH_NOW);
        if (turn && atomic_load(&race.granting) < turn)
            CHECK(hit); /* in force before the look and after it */
        CHECK(applied >= turn);
        CHECK(!hx_revoked_hits(&race.set, 2, 0, 10, HX_EPOCH_NOW));
        if (turn > 1) /* older than the newest revocation, for ever */
            CHECK(hx_revoked_hits(&race.set, 1, 0, 10, turn - 1));
    }
    return NULL;
}

static void test_readers(void)
{
    pthread_t threads[READERS];
    uint64_t span[2] = {0, 10};
    hx_revoked_init(&race.set);
    for (size_t i = 0; i < READERS; i++)
        pthread_create(&threads[i], NULL, look, NULL);
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        CHECK(hx_revoked_add(&race.set, 1, span, 1, turn));
        atomic_store(&race.revoked, turn);
        if (turn % 8 == 0)
            sched_yield();
        atomic_store(&race.granting, turn);
        hx_revoked_grant(&race.set, 1, span, 1);
    }
    atomic_store(&race.over, true);
    for (size_t i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    hx_revoked_free(&race.set);
}

int main(void)
{
    test_model(1);
    test_model(2);
    test_pruning();
    test_edges();
    test_readers();
    return report("test_revoked");
}
