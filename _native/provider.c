/* SPDX-License-Identifier: Apache-2.0 */
/* The providers of this build, best first, and the choice among them: by trying what each says of the pair of
 * memories at hand, never by guessing from the peer. */
#include <stdio.h>
#include <string.h>

#include "provider.h"

static const hx_provider_t *const providers[] = {&hx_provider_shm};

#define COUNT (sizeof providers / sizeof providers[0])

size_t hx_provider_count(void)
{
    return COUNT;
}

const char *hx_provider_name(size_t i)
{
    return providers[i]->name;
}

hx_status_t hx_provider_probe(size_t i, char text[HX_TEXT_MAX])
{
    return providers[i]->probe(text);
}

const hx_provider_t *hx_provider_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                                       char text[HX_TEXT_MAX])
{
    for (size_t i = 0; i < COUNT; i++)
        if (providers[i]->route(ep, local, remote, text) == HX_OK)
            return providers[i];
    return NULL;
}

hx_status_t hx_providers_open(hx_engine_t *engine)
{
    for (size_t i = 0; i < COUNT; i++) {
        if (providers[i]->abi != HX_PROVIDER_ABI)
            return HX_ERR_INTERNAL;
        hx_status_t status = providers[i]->open ? providers[i]->open(engine, &engine->provider_state[i]) : HX_OK;
        if (status != HX_OK)
            return status;
    }
    return HX_OK;
}

void hx_providers_close(hx_engine_t *engine)
{
    for (size_t i = COUNT; i-- > 0;)
        if (providers[i]->close)
            providers[i]->close(engine, engine->provider_state[i]);
}

uint64_t hx_providers_tick(hx_engine_t *engine, uint64_t now_ns)
{
    uint64_t next = hx_fault_tick(engine, now_ns);
    for (size_t i = 0; i < COUNT; i++) {
        uint64_t due = providers[i]->tick ? providers[i]->tick(engine, engine->provider_state[i], now_ns) : 0;
        if (due && (!next || due < next))
            next = due;
    }
    return next;
}
