/* SPDX-License-Identifier: Apache-2.0 */
/* What a transport implements. Engine code never names a provider.
 *
 * submit() takes an operation and returns at once; the provider calls hx_op_finish exactly once, from any thread, when
 * neither buffer is touched any more. A provider whose bytes are moved by the CPU implements prepare() and copy() and
 * submits to the copy threads (hx_sched_submit). */
#ifndef HX_PROVIDER_H
#define HX_PROVIDER_H

#include "core.h"

#define HX_PROVIDER_ABI 1

/* Answers of prepare() and copy() beside hx_status_t: not now; hx_sched_kick() says when to try again. */
#define HX_AGAIN ((hx_status_t) - 1)

struct hx_provider {
    uint32_t abi;
    const char *name;
    /* Can it work on this machine? `text`: one line, why not and what would bring it. */
    hx_status_t (*probe)(char text[HX_TEXT_MAX]);
    hx_status_t (*open)(hx_engine_t *engine, void **state_p);
    void (*close)(hx_engine_t *engine, void *state);
    /* Does it reach this pair? HX_OK, or HX_ERR_NO_PATH with the reason. `local` may be NULL. */
    hx_status_t (*route)(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                         char text[HX_TEXT_MAX]);
    /* Completes it on the posting thread if that is small and cannot wait. False: submit it. */
    bool (*try_inline)(hx_op_t *op);
    void (*submit)(hx_op_t *op);
    /* Periodic, on the control thread while something is pending; answers when it wants to be called next (0:
     * whenever). */
    uint64_t (*tick)(hx_engine_t *engine, void *state, uint64_t now_ns);
    /* Copy threads only. */
    hx_status_t (*prepare)(hx_op_t *op);
    /* Moves batch->first forward as it goes; on HX_AGAIN the rest of the batch is tried later. */
    hx_status_t (*copy)(hx_op_t *op, hx_batch_t *batch, unsigned slot, int *errno_p);
};

/* The provider that carries a transfer of this endpoint between the two regions, or NULL with the reason. */
const hx_provider_t *hx_provider_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                                       char text[HX_TEXT_MAX]);
hx_status_t hx_providers_open(hx_engine_t *engine);
void hx_providers_close(hx_engine_t *engine);
uint64_t hx_providers_tick(hx_engine_t *engine, uint64_t now_ns);

/* provider_fault.c stands in front of whichever provider was chosen when the engine has a fault plan.
 * True: it took the operation. */
bool hx_fault_submit(hx_op_t *op);
uint64_t hx_fault_tick(hx_engine_t *engine, uint64_t now_ns);

extern const hx_provider_t hx_provider_shm;

#endif
