/* SPDX-License-Identifier: Apache-2.0 */
/* The library's link to one peer, on that peer's poster. Under mu, which is dropped while the library is called. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hixl_core.h"

#define CONNECT_TRIES 3
#define RETRY_NS 50000000ull /* between attempts of what was refused */

/* ---- the gate: a poster and the poller do not enter the library for one peer at the same time ---- */

void hx_hixl_enter(hx_hpeer_t *p)
{
    hx_hixl_t *h = p->h;
    p->busy = true; /* first: no new poll of this peer begins */
    h->posting++;
    while (h->bulk || p->polling)
        pthread_cond_wait(&h->gate, &h->mu);
    p->entered_ns = hx_now_ns();
    pthread_mutex_unlock(&h->mu);
}

void hx_hixl_leave(hx_hpeer_t *p)
{
    hx_hixl_t *h = p->h;
    pthread_mutex_lock(&h->mu);
    p->busy = false;
    h->posting--;
    pthread_cond_broadcast(&h->gate);
}

/* ---- raw peers learn of the outcome ---- */

/* Drops the lock: a command that comes too late drops the endpoint's last reference. */
static void tell_all(hx_hpeer_t *p, hx_status_t status)
{
    hx_endpoint_t *list = p->answers;
    char text[2 * HX_TEXT_MAX];
    p->answers = NULL;
    if (!list)
        return;
    snprintf(text, sizeof text, "HIXL answered %u (%s)%s%s", p->last_code, hx_hixl_code_name(p->last_code),
             p->last_detail[0] ? ": " : "", p->last_detail);
    pthread_mutex_unlock(&p->h->mu);
    while (list) {
        hx_command_t *cmd = hx_command_new(HX_CMD_RAW_ANSWER, NULL, 0);
        if (!cmd)
            abort();
        cmd->ep = list; /* with the reference of the list */
        list = list->answer_next;
        cmd->status = status;
        cmd->text = status == HX_OK ? NULL : strdup(text);
        hx_command_push(p->h->engine, cmd);
    }
    pthread_mutex_lock(&p->h->mu);
}

/* ---- down ---- */

void hx_hixl_disconnect(hx_hpeer_t *p)
{
    hx_hixl_t *h = p->h;
    hx_hdone_t done = {NULL, NULL};
    uint32_t code = HX_HIXL_SUCCESS;
    if (p->connected) {
        hx_hixl_enter(p);
        code = h->lib->disconnect(h->object, p->name, h->timeout_ms);
        hx_hixl_leave(p);
    }
    if (code != HX_HIXL_SUCCESS && code != HX_HIXL_NOT_CONNECTED) {
        p->not_before_ns = hx_now_ns() + RETRY_NS; /* until it says that it let go, what it holds stays quarantined */
        return;
    }
    if (p->connected)
        h->connected--;
    p->eager = p->users && !h->stopping && (p->latched || p->eager);
    p->connected = p->latched = p->recall = false;
    p->not_before_ns = 0;
    p->stalls += p->stalled;
    p->stalled = false;
    hx_hixl_swept_away(p, &done);
    pthread_cond_broadcast(&h->gate);
    pthread_mutex_unlock(&h->mu);
    hx_hixl_finish(&done);
    pthread_mutex_lock(&h->mu);
}

/* ---- up ---- */

static void came_up(hx_hpeer_t *p, uint64_t local, uint64_t remote)
{
    p->connected = true;
    p->h->connected++;
    p->connection = p->connection + 1 ? p->connection + 1 : 1;
    p->local_seen = local;
    p->remote_seen = remote;
    p->failures = 0;
    p->not_before_ns = 0;
    tell_all(p, HX_OK);
}

static void stayed_down(hx_hpeer_t *p, uint32_t code, const char *detail)
{
    hx_hdone_t done = {NULL, NULL};
    p->last_code = code;
    snprintf(p->last_detail, sizeof p->last_detail, "%.200s%sConnect to %.120s", detail, detail[0] ? "; " : "",
             p->address);
    p->not_before_ns = hx_now_ns() + RETRY_NS;
    if (++p->failures < CONNECT_TRIES)
        return;
    p->failures = 0;
    tell_all(p, HX_ERR_UNREACHABLE);
    hx_hixl_fail_queued(p, &done); /* everything that waits for this connection */
    pthread_mutex_unlock(&p->h->mu);
    hx_hixl_finish(&done);
    pthread_mutex_lock(&p->h->mu);
}

void hx_hixl_connect(hx_hpeer_t *p)
{
    hx_hixl_t *h = p->h;
    uint64_t local = h->adoptions, remote = atomic_load(&h->engine->announcements);
    char detail[HX_TEXT_MAX] = "";
    p->eager = false;
    h->connecting++;
    hx_hixl_enter(p);
    uint32_t code = h->lib->connect(h->object, p->name, h->timeout_ms);
    if (code != HX_HIXL_SUCCESS)
        hx_hixl_recent_error(h, detail);
    if (code ==
        HX_HIXL_ALREADY_CONNECTED) /* an old link of the library's, dead perhaps: it has to be taken down first */
        h->lib->disconnect(h->object, p->name, h->timeout_ms);
    hx_hixl_leave(p);
    h->connecting--;
    pthread_cond_broadcast(&h->gate);
    if (code == HX_HIXL_SUCCESS)
        came_up(p, local, remote);
    else
        stayed_down(p, code, detail);
}
