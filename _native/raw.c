/* SPDX-License-Identifier: Apache-2.0 */
/* Peers that are not ours: an engine of HIXL's own at "ip:port", with addresses that were agreed beforehand. There is no
 * control link: nothing is announced, revoked, or known of its life. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "provider.h"
#include "sha256.h"

typedef struct {
    uint64_t nbytes, addr, name_len, device; /* then the name, in whole words */
} hx_raw_entry_t;

static size_t words(size_t name_len)
{
    return sizeof(hx_raw_entry_t) / 8 + (name_len + 7) / 8;
}

hx_status_t hx_connect_raw(hx_engine_t *engine, const char *address, const hx_raw_region_t *regions, size_t n,
                           uint64_t token)
{
    size_t total = 0, at = 0;
    if (strlen(address) >= HX_NAME_MAX)
        return HX_ERR_CONFIG;
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(regions[i].name);
        if (!len || len > HX_NAME_MAX || !regions[i].addr || !regions[i].nbytes || regions[i].nbytes > INT64_MAX ||
            regions[i].addr > UINT64_MAX - regions[i].nbytes)
            return HX_ERR_CONFIG;
        total += words(len);
    }
    if (!hx_providers_one_sided(engine))
        return HX_ERR_NO_PATH;
    uint64_t *list = hx_alloc((total + 1) * 8);
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(regions[i].name);
        hx_raw_entry_t e = {regions[i].nbytes, regions[i].addr, len, regions[i].device};
        memcpy(list + at, &e, sizeof e);
        memcpy(list + at + sizeof e / 8, regions[i].name, len);
        at += words(len);
    }
    /* Commands carry pairs of words. */
    hx_command_t *cmd = hx_command_new(HX_CMD_RAW, list, (total + 1) / 2);
    free(list);
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    strcpy(cmd->address, address);
    cmd->token = token;
    cmd->value = n;
    return hx_command_push(engine, cmd);
}

void hx_raw_fail(hx_endpoint_t *ep, hx_status_t status, const char *text)
{
    atomic_store(&ep->lost_status, status);
    atomic_store(&ep->state, HX_EP_LOST); /* never seen by anybody */
    hx_event_t ev = {.kind = HX_EV_CONNECT_FAILED, .token = ep->token, .status = status};
    hx_event_emit(ep->engine, ev, NULL, 0, text, strlen(text));
}

static void begin(hx_engine_t *engine, hx_command_t *cmd)
{
    _Static_assert(sizeof cmd->address > HX_NAME_MAX, "checked in hx_connect_raw");
    hx_endpoint_t *ep = hx_endpoint_new(engine);
    const uint64_t *at = cmd->spans;
    ep->raw = ep->outgoing = true;
    ep->token = cmd->token;
    snprintf(ep->name, sizeof ep->name, "%.128s", cmd->address);
    hx_random(ep->incarnation, sizeof ep->incarnation); /* no two links to it are the same peer */
    for (uint64_t i = 0; i < cmd->value; i++) {
        hx_raw_entry_t e;
        hx_rregion_t *r = hx_rregion_new(ep);
        if (!r)
            abort();
        memcpy(&e, at, sizeof e);
        r->id = i + 1;
        r->nbytes = e.nbytes;
        r->direct = e.addr;
        r->kind = e.device ? HX_KIND_DEVICE : HX_KIND_FOREIGN;
        r->access = HX_ACCESS_READ | HX_ACCESS_WRITE;
        r->name = strndup((const char *)(at + sizeof e / 8), e.name_len);
        r->hash_next = ep->table[r->id % HX_RTABLE];
        ep->table[r->id % HX_RTABLE] = r;
        at += words(e.name_len);
    }
    ep->next = engine->control.endpoints;
    engine->control.endpoints = ep;
    if (!hx_providers_meet(ep, "hixl", 4, (const uint8_t *)cmd->address, strlen(cmd->address), false))
        hx_raw_fail(ep, HX_ERR_CONFIG, "that is this engine's own address, or there are too many peers");
}

static void answer(hx_engine_t *engine, const hx_command_t *cmd)
{
    hx_endpoint_t *ep = cmd->ep;
    if (atomic_load(&ep->state) != HX_EP_SHAKING)
        return;
    if (cmd->status != HX_OK) {
        hx_raw_fail(ep, cmd->status, cmd->text ? cmd->text : "");
        return;
    }
    atomic_fetch_add(&engine->npeers, 1);
    atomic_store(&ep->state, HX_EP_UP);
    hx_event_t up = {.kind = HX_EV_PEER_UP, .ep = ep, .value = 1, .token = ep->token};
    hx_event_emit(engine, up, NULL, 0, NULL, 0);
    for (uint64_t id = 1;; id++) {
        hx_rregion_t *r = hx_endpoint_find(ep, id);
        if (!r)
            break;
        hx_event_t ev = {.kind = HX_EV_REGION_ADD, .ep = ep, .rregion = r};
        hx_event_emit(engine, ev, r->name ? r->name : "", r->name ? strlen(r->name) : 0, NULL, 0);
    }
    ep->ready = true;
    hx_event_t ready = {.kind = HX_EV_PEER_READY, .ep = ep, .value = 1, .token = ep->token};
    hx_event_emit(engine, ready, NULL, 0, NULL, 0);
}

void hx_raw_run(hx_engine_t *engine, hx_command_t *cmd)
{
    if (cmd->kind == HX_CMD_RAW)
        begin(engine, cmd);
    else
        answer(engine, cmd);
}
