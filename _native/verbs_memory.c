/* SPDX-License-Identifier: Apache-2.0 */
/* Registrations: one for each region, with exactly the access that the region gives to peers. On the setup thread, since the
 * kernel pins every page. Addresses in a registration are offsets in the region, so nobody learns where it is. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "link.h"
#include "verbs_core.h"

typedef struct {
    hx_job_t job;
    hx_verbs_t *v;
    hx_region_t *region; /* referenced; NULL: it is going */
    hx_verbs_mr_t *mr;
    hx_job_t *then;
} hx_vjob_t;

static void explain(char text[HX_TEXT_MAX], const hx_region_t *region, int error)
{
    struct rlimit limit;
    int at = snprintf(text, HX_TEXT_MAX, "the RDMA device does not register %llu bytes: %s",
                      (unsigned long long)region->nbytes, strerror(error));
    if ((error == ENOMEM || error == EAGAIN) && !getrlimit(RLIMIT_MEMLOCK, &limit) && limit.rlim_cur != RLIM_INFINITY)
        snprintf(
            text + at, HX_TEXT_MAX - (size_t)at,
            "; this process may lock %llu KiB: raise that with `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity; "
            "docker: --ulimit memlock=-1)",
            (unsigned long long)limit.rlim_cur >> 10);
}

static int register_now(hx_verbs_t *v, hx_region_t *region)
{
    hx_verbs_mr_t *mr;
    uint32_t lkey, rkey;
    bool read = region->access & HX_ACCESS_READ, write = region->access & HX_ACCESS_WRITE;
    int error = v->lib->reg(v->device, region->base, region->nbytes, true, read, write, &mr, &lkey, &rkey);
    bool readonly = error && !write && (error == EFAULT || error == EACCES || error == EPERM);
    if (readonly) /* memory that cannot be written */
        error = v->lib->reg(v->device, region->base, region->nbytes, false, read, false, &mr, &lkey, &rkey);
    if (error)
        return error;
    v->nmrs++;
    region->mr = mr;
    region->lkey = lkey;
    region->lwrite = !readonly;
    region->direct = hx_verbs_name(rkey, region->base);
    return 0;
}

static void run_adopt(hx_job_t *job)
{
    hx_vjob_t *j = (hx_vjob_t *)job;
    hx_region_t *region = j->region;
    hx_verbs_t *v = j->v;
    char text[HX_TEXT_MAX];
    snprintf(text, sizeof text, "%s",
             atomic_load(&v->engine->stopping) ? "the engine is being closed" : "the RDMA device is gone");
    free(j);
    pthread_mutex_lock(&v->reg_mu);
    bool wanted = !v->over && atomic_load(&region->refs) > 1; /* or its memory may be somebody else's by now */
    int error = !wanted ? ECANCELED : region->kind == HX_KIND_DEVICE ? EOPNOTSUPP : register_now(v, region);
    if (error && wanted)
        explain(text, region, error);
    hx_region_adopted(region, error ? 0 : 1,
                      error ? text : NULL); /* under the lock: forget_all() finds it held, or over */
    pthread_mutex_unlock(&v->reg_mu);
}

void hx_verbs_adopt(hx_engine_t *engine, void *state, hx_region_t *region)
{
    hx_vjob_t *j = hx_alloc(sizeof *j);
    *j = (hx_vjob_t){.job.run = run_adopt, .v = state, .region = region}; /* with the caller's reference */
    hx_setup_push(engine, &j->job);
}

/* Under reg_mu. False: the device may touch its memory still, and goes on doing so until the process ends. */
static bool drop(hx_verbs_t *v, hx_verbs_mr_t *mr)
{
    if (mr && v->lib->dereg(mr)) {
        v->engine->abandoned = true;
        return false;
    }
    v->nmrs -= mr != NULL;
    if (v->over && !v->nmrs && v->device) {
        v->lib->close(v->device);
        v->device = NULL;
    }
    return true;
}

static void run_leave(hx_job_t *job)
{
    hx_vjob_t *j = (hx_vjob_t *)job;
    hx_region_t *region = j->region;
    hx_engine_t *engine = region ? region->engine : NULL;
    hx_job_t *then = j->then;
    pthread_mutex_lock(&j->v->reg_mu);
    hx_verbs_mr_t *mr = region ? region->mr : j->mr;
    bool left = drop(j->v, mr);
    if (region && left)
        region->mr = NULL;
    pthread_mutex_unlock(&j->v->reg_mu);
    free(j);
    if (!left)
        return; /* its memory is kept: nobody is told that nothing touches it */
    if (region) {
        atomic_store(&region->adoption, HX_ADOPT_NONE);
        hx_region_unref(region);
        hx_control_wake(engine);
    }
    if (then)
        then->run(then);
}

void hx_verbs_withdraw(hx_engine_t *engine, void *state, hx_region_t *region)
{
    hx_vjob_t *j = hx_alloc(sizeof *j);
    hx_region_ref(region);
    *j = (hx_vjob_t){.job.run = run_leave, .v = state, .region = region};
    hx_setup_push(engine, &j->job);
}

void hx_verbs_disown(hx_engine_t *engine, void *state, hx_region_t *region, hx_job_t *then)
{
    hx_vjob_t *j = hx_alloc(sizeof *j);
    *j = (hx_vjob_t){.job.run = run_leave, .v = state, .mr = region->mr, .then = then};
    region->mr = NULL;
    hx_setup_push(engine, &j->job);
}

void hx_verbs_forget_all(hx_verbs_t *v)
{
    hx_engine_t *engine = v->engine;
    pthread_mutex_lock(&v->reg_mu);
    v->over = true;
    for (int i = 0; i < 2; i++) {
        if (v->scratch_mr[i])
            v->lib->dereg(v->scratch_mr[i]);
        v->scratch_mr[i] = NULL;
    }
    for (hx_verbs_mr_t *mr = NULL;;
         mr = NULL) { /* one at a time: others wait for the list, and a large one takes a while */
        pthread_mutex_lock(&engine->regions_mu);
        for (hx_region_t *r = engine->regions; r && !mr; r = r->next) {
            uint32_t held = HX_ADOPT_HELD;
            mr = r->mr;
            r->mr = NULL;
            if (mr)
                atomic_compare_exchange_strong(&r->adoption, &held, HX_ADOPT_NONE);
        }
        pthread_mutex_unlock(&engine->regions_mu);
        if (!mr)
            break;
        drop(v, mr);
    }
    drop(v, NULL);
    pthread_mutex_unlock(&v->reg_mu);
}
