/* SPDX-License-Identifier: Apache-2.0 */
/* One thread for kernel work that takes milliseconds to seconds (page population, unmapping) and that neither the
 * event loop nor the control thread (liveness!) may wait for. */
#define _GNU_SOURCE
#include "core.h"

static hx_job_t *take(hx_setup_t *setup)
{
    pthread_mutex_lock(&setup->mu);
    hx_job_t *job = setup->head;
    if (job) {
        setup->head = job->next;
        if (!setup->head)
            setup->tail = NULL;
    }
    pthread_mutex_unlock(&setup->mu);
    return job;
}

static void *run(void *arg)
{
    hx_setup_t *setup = arg;
    for (;;) {
        uint32_t seen = hx_bell_read(&setup->bell);
        hx_job_t *job = take(setup);
        if (job)
            job->run(job);
        else if (atomic_load(&setup->stopping))
            return NULL;
        else
            hx_bell_wait(&setup->bell, seen);
    }
}

hx_status_t hx_setup_start(hx_engine_t *engine)
{
    hx_setup_t *setup = &engine->setup;
    if (!hx_thread_start(&setup->thread, run, setup, "hx-setup"))
        return HX_ERR_SYSTEM;
    setup->started = true;
    return HX_OK;
}

void hx_setup_push(hx_engine_t *engine, hx_job_t *job)
{
    hx_setup_t *setup = &engine->setup;
    job->next = NULL;
    pthread_mutex_lock(&setup->mu);
    /* After the thread has gone (a handle that outlives its engine), the caller does the work itself. */
    bool here = !setup->started;
    if (!here) {
        if (setup->tail)
            setup->tail->next = job;
        else
            setup->head = job;
        setup->tail = job;
    }
    pthread_mutex_unlock(&setup->mu);
    if (here)
        job->run(job);
    else
        hx_bell_ring(&setup->bell, 1);
}

void hx_setup_stop(hx_engine_t *engine)
{
    hx_setup_t *setup = &engine->setup;
    if (!setup->started)
        return;
    atomic_store(&setup->stopping, true);
    hx_bell_ring(&setup->bell, 1);
    pthread_join(setup->thread, NULL);
    pthread_mutex_lock(&setup->mu);
    setup->started = false;
    pthread_mutex_unlock(&setup->mu);
    for (hx_job_t *job; (job = take(setup));)
        job->run(job);
}
