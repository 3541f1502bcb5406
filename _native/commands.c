/* SPDX-License-Identifier: Apache-2.0 */
/* What other threads ask of the control thread: queued under a lock that is never held while anything is done. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"

hx_command_t *hx_command_new(hx_cmd_kind_t kind, const uint64_t *spans, size_t n)
{
    hx_command_t *cmd = calloc(1, sizeof *cmd + n * 16);
    if (!cmd)
        return NULL;
    cmd->kind = kind;
    cmd->n = n;
    if (n)
        memcpy(cmd->spans, spans, n * 16);
    return cmd;
}

static void free_command(hx_command_t *cmd)
{
    hx_region_unref(cmd->region);
    hx_endpoint_unref(cmd->ep);
    hx_rregion_unref(cmd->rregion);
    free(cmd->text);
    free(cmd);
}

void hx_control_wake(hx_engine_t *engine)
{
    uint64_t one = 1;
    while (write(engine->control.wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

hx_status_t hx_command_push(hx_engine_t *engine, hx_command_t *cmd)
{
    hx_control_t *c = &engine->control;
    pthread_mutex_lock(&c->mu);
    bool closed = c->closed;
    if (!closed) {
        cmd->next = NULL;
        if (c->tail)
            c->tail->next = cmd;
        else
            c->head = cmd;
        c->tail = cmd;
    }
    pthread_mutex_unlock(&c->mu);
    if (closed) {
        free_command(cmd);
        return HX_ERR_CLOSED;
    }
    hx_control_wake(engine);
    return HX_OK;
}

void hx_control_arm_tick(hx_engine_t *engine)
{
    atomic_bool *armed = &engine->control.tick_armed;
    if (!atomic_load(armed) && !atomic_exchange(armed, true))
        hx_control_wake(engine);
}

hx_status_t hx_connect(hx_engine_t *engine, const hx_target_t *target)
{
    hx_command_t *cmd = hx_command_new(HX_CMD_CONNECT, NULL, 0);
    const char *address = target->path ? target->path : target->tcp_host;
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    if (!address || strlen(address) >= sizeof cmd->address || (target->name && strlen(target->name) > HX_NAME_MAX)) {
        free(cmd);
        return HX_ERR_CONFIG;
    }
    strcpy(cmd->address, address);
    cmd->tcp = !target->path;
    cmd->port = target->tcp_port;
    cmd->token = target->token;
    if (target->name)
        strcpy(cmd->name, target->name);
    cmd->has_incarnation = target->incarnation != NULL;
    if (target->incarnation)
        memcpy(cmd->incarnation, target->incarnation, sizeof cmd->incarnation);
    return hx_command_push(engine, cmd);
}

hx_status_t hx_supersede(hx_engine_t *engine, const char *name, uint64_t epoch)
{
    hx_command_t *cmd = hx_command_new(HX_CMD_SUPERSEDE, NULL, 0);
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    snprintf(cmd->name, sizeof cmd->name, "%s", name);
    cmd->value = epoch;
    return hx_command_push(engine, cmd);
}

static hx_status_t push_endpoint(hx_endpoint_t *ep, hx_cmd_kind_t kind, uint64_t value)
{
    hx_command_t *cmd = hx_command_new(kind, NULL, 0);
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    hx_endpoint_ref(ep);
    cmd->ep = ep;
    cmd->value = value;
    return hx_command_push(ep->engine, cmd);
}

void hx_endpoint_expect(hx_endpoint_t *ep, int change)
{
    atomic_fetch_add(&ep->expecting, (uint32_t)change);
    hx_control_arm_tick(ep->engine);
}

hx_status_t hx_endpoint_close(hx_endpoint_t *ep)
{
    return push_endpoint(ep, HX_CMD_CLOSE, 0);
}

hx_status_t hx_endpoint_credit(hx_endpoint_t *ep, uint32_t notes)
{
    return push_endpoint(ep, HX_CMD_CREDIT, notes);
}

hx_status_t hx_endpoint_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                              const char **provider_p, char text[HX_TEXT_MAX])
{
    const hx_provider_t *p = hx_provider_route(ep, local, remote, text);
    if (!p)
        return HX_ERR_NO_PATH;
    *provider_p = p->name;
    return HX_OK;
}

static bool announceable(const hx_region_t *r)
{
    return r->wanted && !r->announced && atomic_load(&r->state) == HX_REGION_READY;
}

/* All regions that have become ready, as one announcement. */
static void announce_ready(hx_engine_t *engine)
{
    hx_region_t **list = NULL;
    size_t n = 0, count = 0;
    pthread_mutex_lock(&engine->regions_mu);
    for (hx_region_t *r = engine->regions; r; r = r->next)
        count += announceable(r);
    if (count)
        list = hx_alloc(count * sizeof *list);
    for (hx_region_t *r = engine->regions; r && n < count; r = r->next)
        if (announceable(r))
            list[n++] = r; /* `wanted` holds a reference, which only this thread drops */
    pthread_mutex_unlock(&engine->regions_mu);
    for (size_t i = 0; i < n / 2; i++) { /* the engine's list has the newest first */
        hx_region_t *r = list[i];
        list[i] = list[n - 1 - i];
        list[n - 1 - i] = r;
    }
    if (n)
        hx_frames_announce(engine, list, n);
    free(list);
}

static void run_command(hx_engine_t *engine, hx_command_t *cmd)
{
    hx_endpoint_t *ep = cmd->ep;
    bool linked = ep && ep->link && !ep->link->dead;
    switch (cmd->kind) {
    case HX_CMD_CONNECT:
        hx_link_connect(engine, cmd);
        break;
    case HX_CMD_ANNOUNCE:
        cmd->region->wanted = true;
        cmd->region = NULL; /* the reference goes with it */
        atomic_store(&engine->control.rescan, true);
        break;
    case HX_CMD_REVOKE:
    case HX_CMD_DEREGISTER:
        hx_revoke_start(engine, cmd);
        break;
    case HX_CMD_GRANT:
        hx_revoke_grant(engine, cmd);
        break;
    case HX_CMD_ASK_MAP:
        if (linked)
            hx_link_send(ep->link, HX_F_MAP_ASK, cmd->rregion->id, NULL, 0, -1);
        break;
    case HX_CMD_CREDIT:
        if (linked) {
            uint32_t held = ep->link->notes_held;
            ep->link->notes_held = held > cmd->value ? held - (uint32_t)cmd->value : 0;
            hx_link_send(ep->link, HX_F_CREDIT, cmd->value, NULL, 0, -1);
        }
        break;
    case HX_CMD_CLOSE:
        hx_live_say_goodbye_to(ep);
        break;
    case HX_CMD_PING:
        if (linked)
            hx_link_send(ep->link, HX_F_PING, cmd->value, NULL, 0, -1);
        break;
    case HX_CMD_PATH:
        if (linked)
            hx_frames_say_paths_anew(ep->link);
        break;
    case HX_CMD_DIAL:
        hx_link_dial(ep, (uint32_t)cmd->value);
        break;
    case HX_CMD_RAW:
    case HX_CMD_RAW_ANSWER:
        hx_raw_run(engine, cmd);
        break;
    case HX_CMD_SUPERSEDE:
        hx_control_epoch_ok(engine, cmd->name, cmd->value, true);
        hx_control_supersede(engine, cmd->name, cmd->value);
        break;
    }
    free_command(cmd);
}

void hx_commands_run(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    pthread_mutex_lock(&c->mu);
    hx_command_t *cmd = c->head;
    c->head = c->tail = NULL;
    pthread_mutex_unlock(&c->mu);
    while (cmd) {
        hx_command_t *next = cmd->next;
        run_command(engine, cmd);
        cmd = next;
    }
    if (atomic_exchange(&c->rescan, false))
        announce_ready(engine);
}
