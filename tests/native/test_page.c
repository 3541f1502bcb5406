/* SPDX-License-Identifier: Apache-2.0 */
/* The page that a writer shares with the owner of the memory, and the promise it stands on: a writer that went on with
 * an old revoke_seq is seen by the owner who moved it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "core.h"

enum { PAGE = 4096 };

static hx_page_t *pair(hx_page_t **other_p)
{
    int fd = -1;
    hx_page_t *mine = hx_page_create(&fd);
    *other_p = hx_page_import(fd);
    CHECK(mine && *other_p);
    return mine;
}

static void test_slots(void)
{
    hx_page_t *owner, *writer = pair(&owner);
    CHECK(!hx_page_busy(owner));
    CHECK_EQ(hx_page_overlap(owner, 1, 0, UINT64_MAX), 0);
    CHECK_EQ(hx_page_revoke_seq(writer), 0);
    hx_page_set_revoke_seq(owner, 7);
    CHECK_EQ(hx_page_revoke_seq(writer), 7);

    for (unsigned slot = 0; slot < HX_SLOTS; slot++) {
        hx_page_publish(writer, slot, 5, 1000, 1100);
        CHECK(hx_page_busy(owner));
        static const struct {
            uint64_t region, off, end, held;
        } cases[] = {
            {5, 1000, 1100, 100}, {5, 0, 2000, 100},   {5, 0, 1000, 0},    {5, 1100, 2000, 0}, {5, 1099, 2000, 1},
            {5, 0, 1001, 1},      {5, 1040, 1050, 10}, {6, 1000, 1100, 0}, {5, 1050, 1050, 0}, {5, 0, UINT64_MAX, 100},
        };
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            CHECK_EQ(hx_page_overlap(owner, cases[i].region, cases[i].off, cases[i].end), cases[i].held);
        hx_page_clear(writer, slot);
        CHECK(!hx_page_busy(owner));
        CHECK_EQ(hx_page_overlap(owner, 5, 0, UINT64_MAX), 0);
    }

    /* Several slots add up, but never to more than was asked for. */
    for (unsigned slot = 0; slot < 10; slot++)
        hx_page_publish(writer, slot, 5, 0, 100);
    CHECK_EQ(hx_page_overlap(owner, 5, 0, 5000), 1000);
    CHECK_EQ(hx_page_overlap(owner, 5, 50, 150), 100);
    for (unsigned slot = 0; slot < 9; slot++)
        hx_page_clear(writer, slot);
    CHECK(hx_page_busy(owner));
    CHECK_EQ(hx_page_overlap(owner, 5, 0, 5000), 100);
    hx_page_clear(writer, 9);
    CHECK(!hx_page_busy(owner));
    hx_page_unmap(writer);
    hx_page_unmap(owner);
    hx_page_unmap(NULL);
}

static int sealed(off_t size, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, size) == 0 && (!seals || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}

static void test_import(void)
{
    const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    int before = open_descriptors(), pipes[2];
    CHECK(!hx_page_import(sealed(PAGE, 0)));
    CHECK(!hx_page_import(sealed(PAGE, F_SEAL_GROW)));
    CHECK(!hx_page_import(sealed(PAGE, F_SEAL_SHRINK | F_SEAL_GROW))); /* more seals could be added later */
    CHECK(!hx_page_import(sealed(PAGE - 1, all)));
    CHECK(!hx_page_import(sealed(PAGE + 1, all)));
    CHECK(!hx_page_import(sealed(0, all)));
    CHECK(!hx_page_import(sealed(16 * PAGE, all)));
    CHECK(!hx_page_import(sealed(PAGE, all | F_SEAL_WRITE))); /* cannot be mapped writable */
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    CHECK(!hx_page_import(pipes[0]));
    CHECK(!hx_page_import(pipes[1]));
    CHECK(!hx_page_import(open("/dev/zero", O_RDWR | O_CLOEXEC)));
    CHECK(!hx_page_import(-1));
    hx_page_t *good = hx_page_import(sealed(PAGE, all));
    CHECK(good != NULL);
    hx_page_unmap(good);
    CHECK_EQ(open_descriptors(), before); /* the descriptor is taken, whatever the answer */
}

/* ---- the promise ---- */

enum { WRITERS = 1, ROUNDS = 20000, REGION = 3, LEN = 1000 };

static struct {
    hx_page_t *writer, *owner;
    _Atomic uint64_t applied; /* what the control link has told the writers */
    _Atomic uint64_t freed;   /* the owner relies on it: no permission older than this is in use */
    _Atomic bool over;
    _Atomic uint64_t went_on, held_back;
} shared;

static void *write_on(void *arg)
{
    unsigned slot = (unsigned)(uintptr_t)arg;
    uint64_t random = 11 + slot;
    while (!atomic_load(&shared.over)) {
        /* Most spans overlap the owner's; the others are there to be confused with them. */
        uint64_t region = draw_below(&random, 4) ? REGION : REGION + 1, off = draw_below(&random, LEN);
        hx_page_publish(shared.writer, slot, region, off, off + 1);
        uint64_t seq = hx_page_revoke_seq(shared.writer);
        if (seq == atomic_load(&shared.applied)) {
            atomic_fetch_add_explicit(&shared.went_on, 1, memory_order_relaxed);
            for (uint64_t spin = draw_below(&random, 2) ? 200 : 0; spin; spin--)
                if (region == REGION && atomic_load(&shared.freed) > seq) {
                    CHECK(!"the owner was told that nobody holds its bytes");
                    atomic_store(&shared.over, true);
                    break;
                }
        } else {
            atomic_fetch_add_explicit(&shared.held_back, 1, memory_order_relaxed);
        }
        hx_page_clear(shared.writer, slot);
    }
    return NULL;
}

static void test_promise(void)
{
    pthread_t threads[WRITERS];
    uint64_t random = 5, seen = 0;
    shared.writer = pair(&shared.owner);
    for (uintptr_t i = 0; i < WRITERS; i++)
        pthread_create(&threads[i], NULL, write_on, (void *)i);
    for (uint64_t seq = 1; seq <= ROUNDS && !atomic_load(&shared.over); seq++) {
        hx_page_set_revoke_seq(shared.owner, seq);
        for (uint64_t held; (held = hx_page_overlap(shared.owner, REGION, 0, 2 * LEN)); seen++) {
            CHECK(held <= WRITERS);
            if (seen % 64 == 0)
                sched_yield();
        }
        atomic_store(&shared.freed, seq);
        for (uint64_t spin = draw_below(&random, 100); spin; spin--)
            atomic_load(&shared.freed);
        atomic_store(&shared.applied, seq);
        /* The next revocation falls while the writer goes on. */
        uint64_t before = atomic_load(&shared.went_on);
        for (uint64_t spin = 1; atomic_load(&shared.went_on) < before + 2 && !atomic_load(&shared.over); spin++)
            if (spin % 512 == 0)
                sched_yield();
    }
    atomic_store(&shared.over, true);
    for (size_t i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    CHECK(!hx_page_busy(shared.owner));
    CHECK(atomic_load(&shared.went_on) > 0);
    CHECK(atomic_load(&shared.held_back) > 0);
    hx_page_unmap(shared.writer);
    hx_page_unmap(shared.owner);
}

int main(void)
{
    test_slots();
    test_import();
    test_promise();
    return report("test_page");
}
