/* SPDX-License-Identifier: Apache-2.0 */
/* The providers of this build, best first, and the choice among them: by trying what each says of the pair of
 * memories at hand, never by guessing from the peer. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "provider.h"

static const hx_provider_t *const providers[] = {&hx_provider_shm, &hx_provider_hixl, &hx_provider_verbs,
                                                 &hx_provider_tcp};

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

static bool is_open(const hx_engine_t *engine, size_t i)
{
    return engine->provider_open & 1u << i;
}

_Static_assert(COUNT <= sizeof((hx_engine_t *)0)->provider_state / sizeof(void *), "a state for each provider");

void *hx_provider_state(const hx_engine_t *engine, const hx_provider_t *provider)
{
    for (size_t i = 0; i < COUNT; i++)
        if (providers[i] == provider)
            return engine->provider_state[i];
    return NULL;
}

/* Runs the statement for each open provider that has the hook, as `p` with its `state`. The engine is looked up once: what
 * leads to it may be gone after a statement. */
#define FOR_EACH_WITH(hook, engine, statement)                           \
    for (const hx_engine_t *engine_ = (engine); engine_; engine_ = NULL) \
        for (size_t i_ = 0; i_ < COUNT; i_++)                            \
            if (is_open(engine_, i_) && providers[i_]->hook) {           \
                const hx_provider_t *p = providers[i_];                  \
                void *state = engine_->provider_state[i_];               \
                (void)p;                                                 \
                (void)state;                                             \
                statement;                                               \
            }

const hx_provider_t *hx_provider_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                                       char text[HX_TEXT_MAX])
{
    size_t at = 0;
    for (size_t i = 0; i < COUNT; i++) {
        char why[HX_TEXT_MAX];
        if (!is_open(ep->engine, i))
            continue;
        if (providers[i]->route(ep, local, remote, text ? why : NULL) == HX_OK) {
            if (text)
                memcpy(text, why, HX_TEXT_MAX);
            return providers[i];
        }
        if (text && at < HX_TEXT_MAX)
            at += (size_t)snprintf(text + at, HX_TEXT_MAX - at, "%s%s: %s", at ? "; " : "", providers[i]->name, why);
    }
    return NULL;
}

const hx_provider_t *hx_provider_choose(const hx_op_t *op)
{
    for (size_t i = 0; i < COUNT; i++) {
        bool all = is_open(op->ep->engine, i);
        for (size_t part = 0; part < op->nparts && all; part++)
            all = providers[i]->route(op->ep, op->parts[part].local, op->parts[part].remote, NULL) == HX_OK;
        if (all)
            return providers[i];
    }
    return NULL;
}

hx_status_t hx_providers_open(hx_engine_t *engine, char text[HX_TEXT_MAX])
{
    for (size_t i = 0; i < COUNT; i++) {
        const hx_provider_t *p = providers[i];
        if (p->abi != HX_PROVIDER_ABI)
            return HX_ERR_INTERNAL;
        if (!(engine->config.transports & p->transport))
            continue;
        hx_status_t status = p->open ? p->open(engine, &engine->provider_state[i], text) : HX_OK;
        if (!p->open || engine->provider_state[i])
            engine->provider_open |= 1u << i; /* also one that failed half-way: it has threads to join */
        if (status != HX_OK)
            return status;
    }
    return HX_OK;
}

void hx_providers_stop(hx_engine_t *engine)
{
    FOR_EACH_WITH(stop, engine, p->stop(engine, state))
}

void hx_providers_close(hx_engine_t *engine){FOR_EACH_WITH(close, engine, p -> close(engine, state))}

uint64_t hx_providers_tick(hx_engine_t *engine, uint64_t now_ns)
{
    uint64_t next = hx_fault_tick(engine, now_ns);
    FOR_EACH_WITH(tick, engine, {
        uint64_t due = p->tick(engine, state, now_ns);
        if (due && (!next || due < next))
            next = due;
    })
    return next;
}

bool hx_providers_assist(hx_engine_t *engine)
{
    bool any = false;
    FOR_EACH_WITH(assist, engine, any |= p->assist(engine, state))
    return any;
}

void hx_providers_overdue(hx_engine_t *engine, const hx_op_t *op, uint32_t gen)
{
    FOR_EACH_WITH(overdue, engine, p->overdue(engine, state, op, gen))
}

void hx_providers_kick(hx_engine_t *engine)
{
    FOR_EACH_WITH(kick, engine, p->kick(engine, state))
}

bool hx_providers_adopt(hx_region_t *region)
{
    /* One at most: no build has two libraries that must know a region. */
    FOR_EACH_WITH(adopt, region->engine, {
        atomic_store(&region->adoption, HX_ADOPT_PENDING);
        hx_region_ref(region);
        p->adopt(region->engine, state, region);
        return true;
    })
    return false;
}

void hx_providers_withdraw(hx_region_t *region)
{
    atomic_store(&region->adoption, HX_ADOPT_LEAVING);
    FOR_EACH_WITH(withdraw, region->engine, p->withdraw(region->engine, state, region))
}

void hx_providers_disown(hx_region_t *region, hx_job_t *then)
{
    FOR_EACH_WITH(disown, region->engine, {
        p->disown(region->engine, state, region, then);
        return;
    })
    if (then)
        hx_setup_push(region->engine, then);
}

size_t hx_providers_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p)
{
    *tags_p = NULL;
    FOR_EACH_WITH(touching, ep->engine, return p->touching(ep, region, spans, n, tags_p))
    return 0;
}

bool hx_providers_hold(hx_endpoint_t *ep, uint64_t tag)
{
    FOR_EACH_WITH(holds, ep->engine, return p->holds(ep, tag))
    return false;
}

bool hx_providers_idle(hx_endpoint_t *ep)
{
    bool idle = true;
    FOR_EACH_WITH(idle, ep->engine, idle &= p->idle(ep))
    return idle;
}

void hx_providers_recall(hx_endpoint_t *ep)
{
    FOR_EACH_WITH(recall, ep->engine, p->recall(ep))
}

void hx_providers_release(hx_endpoint_t *ep)
{
    FOR_EACH_WITH(release, ep->engine, p->release(ep))
}

void hx_providers_forget(hx_endpoint_t *ep)
{
    FOR_EACH_WITH(forget, ep->engine, p->forget(ep))
}

void hx_providers_send_raw(hx_op_t *op)
{
    FOR_EACH_WITH(send_raw, op->ep->engine, p->send_raw(op))
}

void hx_providers_introduce(hx_endpoint_t *ep,
                            void (*say)(void *to, const char *name, uint64_t feature, const uint8_t *body, size_t n),
                            void *to){FOR_EACH_WITH(introduce, ep -> engine,
                                                    {
                                                        uint8_t body[512];
                                                        say(to, p->name, p->feature, body,
                                                            p->introduce(ep, state, body, sizeof body));
                                                    })}

uint64_t hx_providers_features(const hx_engine_t *engine)
{
    uint64_t features = 0;
    FOR_EACH_WITH(feature, engine, features |= p->feature)
    return features;
}

uint64_t hx_providers_landing(hx_endpoint_t *ep, uint64_t region, uint64_t off, uint64_t end)
{
    FOR_EACH_WITH(landing, ep->engine, return p->landing(ep, region, off, end))
    return 0;
}

void hx_providers_evict(hx_endpoint_t *ep)
{
    FOR_EACH_WITH(evict, ep->engine, p->evict(ep))
}

void hx_providers_keep_out(hx_endpoint_t *ep){FOR_EACH_WITH(keep_out, ep -> engine, p->keep_out(ep))}

uint64_t hx_providers_kept_out(hx_endpoint_t *ep)
{
    FOR_EACH_WITH(kept_out, ep->engine, return p->kept_out(ep))
    return 0;
}

void hx_providers_take_socket(hx_endpoint_t *ep, int fd, unsigned stream, const uint8_t *early, size_t n)
{
    FOR_EACH_WITH(take_socket, ep->engine, {
        p->take_socket(ep, fd, stream, early, n);
        return;
    })
    close(fd);
}

bool hx_providers_settled(hx_endpoint_t *ep)
{
    bool settled = true;
    FOR_EACH_WITH(settled, ep->engine, settled &= p->settled(ep))
    return settled;
}

bool hx_providers_make_room(hx_endpoint_t *ep, unsigned stream)
{
    FOR_EACH_WITH(make_room, ep->engine, return p->make_room(ep, stream))
    return false;
}

void hx_providers_fork(hx_engine_t *engine, hx_fork_t where)
{
    FOR_EACH_WITH(forked, engine, {
        if (where == HX_FORK_BEFORE)
            p->before_fork(state);
        else if (where == HX_FORK_PARENT)
            p->after_fork(state);
        else
            p->forked(state);
    })
}

void hx_providers_dial_failed(hx_endpoint_t *ep)
{
    FOR_EACH_WITH(dial_failed, ep->engine, p->dial_failed(ep))
}

bool hx_providers_data_address(hx_endpoint_t *ep, struct sockaddr_storage *ss, socklen_t *len_p, uint64_t *session_p)
{
    FOR_EACH_WITH(data_address, ep->engine, return p->data_address(ep, ss, len_p, session_p))
    return false;
}

bool hx_providers_meet(hx_endpoint_t *ep, const char *name, size_t name_len, const uint8_t *body, size_t n, bool late)
{
    FOR_EACH_WITH(meet, ep->engine, {
        if (strlen(p->name) == name_len && !memcmp(p->name, name, name_len))
            return (!late || p->renews) && p->meet(ep, state, body, n);
    })
    return !late;
}

void hx_providers_proven(hx_endpoint_t *ep, uint64_t arg)
{
    FOR_EACH_WITH(proven, ep->engine, p->proven(ep, arg))
}

bool hx_providers_one_sided(const hx_engine_t *engine)
{
    FOR_EACH_WITH(touching, engine, return true)
    return false;
}
