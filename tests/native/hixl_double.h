/* SPDX-License-Identifier: Apache-2.0 */
/* A test double of the binding, between the provider and the stand-in. It passes everything on; but a test can hold a
 * thread of the provider's up at a gate just before the library, and put an answer into the library's mouth. */
#ifndef HIXL_DOUBLE_H
#define HIXL_DOUBLE_H

#include "gate.h"
#include "hixl_load.h"
#include "hixl_pair.h"

static gate_t at_post = GATE, at_event = GATE;
/* Codes, 0: what the library says. Of one post, which has begun all the same; of every Disconnect, which has done nothing. */
static _Atomic uint32_t begun_code, stuck_code;
static _Atomic uint32_t stuck_disconnects; /* how many got that answer */
static _Atomic int names;                  /* of peers, alive */

static const hx_hixl_table_t *real_table;

static hx_hixl_name_t *double_name(const char *text)
{
    atomic_fetch_add(&names, 1);
    return real_table->name(text);
}

static void double_free_name(hx_hixl_name_t *name)
{
    atomic_fetch_sub(&names, 1);
    real_table->free_name(name);
}

static uint32_t double_post(hx_hixl_object_t *object, const hx_hixl_name_t *peer, int32_t direction,
                            const hx_hixl_desc_t *descs, size_t n, uint64_t user_data, void **request_p)
{
    pass(&at_post);
    uint32_t code = real_table->post(object, peer, direction, descs, n, user_data, request_p);
    uint32_t wanted = code == HX_HIXL_SUCCESS ? atomic_exchange(&begun_code, 0) : 0;
    return wanted ? wanted : code;
}

static uint32_t double_disconnect(hx_hixl_object_t *object, const hx_hixl_name_t *peer, int32_t timeout_ms)
{
    uint32_t code = atomic_load(&stuck_code);
    if (code)
        atomic_fetch_add(&stuck_disconnects, 1);
    return code ? code : real_table->disconnect(object, peer, timeout_ms);
}

/* after= of operations is any pointer here: an event of an NPU that is complete once the gate lets it pass. */
static int double_query_event(void *event, int32_t *status_p)
{
    (void)event;
    pass(&at_event);
    *status_p = HX_ACL_EVENT_COMPLETE;
    return 0;
}

/* From here on, engines of this process call the double. */
static inline bool begin_double(void)
{
    static hx_hixl_table_t table;
    const hx_vendor_t *loaded;
    char text[HX_TEXT_MAX];
    if (!begin_hixl() || !CHECK(hx_vendor_load(BINDING, STANDIN, &loaded, text) == HX_OK))
        return false;
    hx_vendor_t *vendor = (hx_vendor_t *)(uintptr_t)loaded;
    real_table = vendor->hixl;
    table = *real_table;
    table.name = double_name;
    table.free_name = double_free_name;
    table.post = double_post;
    table.disconnect = double_disconnect;
    vendor->hixl = &table;
    vendor->acl.query_event = double_query_event;
    return true;
}

#endif
