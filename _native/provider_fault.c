/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in front of the chosen provider and plays a plan of misfortunes, keyed by the number of the transfer on this
 * engine: deterministic, and without a trace in the engine's own code. For tests, ours and users'. */
#include <signal.h>
#include <unistd.h>

#include "provider.h"

bool hx_fault_submit(hx_op_t *op)
{
    hx_engine_t *engine = op->ep->engine;
    if (!engine->config.nfaults)
        return false;
    uint64_t nth = atomic_fetch_add(&engine->fault_count, 1);
    for (size_t i = 0; i < engine->config.nfaults; i++) {
        const hx_fault_t *f = &engine->faults[i];
        if (f->nth != nth)
            continue;
        if (f->action == HX_FAULT_DIE)
            kill(getpid(), SIGKILL);
        if (f->action == HX_FAULT_FAIL) {
            hx_op_finish(op, (hx_status_t)f->status);
            return true;
        }
        op->hold_action = f->action;
        /* DELAY: until then. WEDGE: so long after a cancel, which it cannot obey. STALL: until cancelled. */
        op->hold_until_ns = f->action == HX_FAULT_DELAY ? hx_now_ns() + f->delay_ns : f->delay_ns;
        atomic_store(&op->progress_ns, hx_now_ns());
        atomic_store(&op->stage, HX_STAGE_HELD);
        pthread_mutex_lock(&engine->fault_mu);
        op->next = engine->fault_held;
        engine->fault_held = op;
        pthread_mutex_unlock(&engine->fault_mu);
        hx_control_wake(engine); /* for the tick at its time */
        return true;
    }
    return false;
}

/* Is the operation to be let go now, and with which status? HX_AGAIN: held on. */
static hx_status_t judge(hx_engine_t *engine, hx_op_t *op, uint64_t now_ns, uint64_t *due_p)
{
    hx_status_t verdict = hx_op_verdict(op);
    if (op->hold_action == HX_FAULT_WEDGE && verdict != HX_OK && !atomic_load(&engine->stopping)) {
        uint64_t since = atomic_load(&op->cancel_ns);
        uint64_t due = (since && since >= op->posted_ns ? since : op->posted_ns) + op->hold_until_ns;
        if (now_ns < due) {
            *due_p = due;
            return HX_AGAIN;
        }
    }
    if (verdict != HX_OK)
        return verdict;
    if (op->hold_action == HX_FAULT_DELAY) {
        if (now_ns >= op->hold_until_ns)
            return HX_OK;
        *due_p = op->hold_until_ns;
    }
    return HX_AGAIN;
}

uint64_t hx_fault_tick(hx_engine_t *engine, uint64_t now_ns)
{
    uint64_t next = 0;
    hx_op_t *go = NULL;
    pthread_mutex_lock(&engine->fault_mu);
    for (hx_op_t **p = &engine->fault_held; *p;) {
        hx_op_t *op = *p;
        uint64_t due = 0;
        hx_status_t status = judge(engine, op, now_ns, &due);
        if (status == HX_AGAIN) {
            if (due && (!next || due < next))
                next = due;
            p = &op->next;
            continue;
        }
        *p = op->next;
        op->next = go;
        op->status = status;
        go = op;
    }
    pthread_mutex_unlock(&engine->fault_mu);
    while (go) {
        hx_op_t *op = go;
        go = op->next;
        if (op->status == HX_OK) {
            atomic_store(&op->progress_ns, 0);
            op->provider->submit(op);
        } else {
            hx_op_finish(op, op->status);
        }
    }
    return next;
}
