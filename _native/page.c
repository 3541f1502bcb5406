/* SPDX-License-Identifier: Apache-2.0 */
/* One page per endpoint and direction, mapped by the writer of some memory and by its owner.
 *
 * The writer, before it touches the owner's bytes: (1) fills a slot with the span, (2) marks it active, (3) reads
 * revoke_seq; if that has moved past what it has applied, it clears the slot and touches nothing. The owner, to take
 * bytes back: (1) moves revoke_seq, (2) reads the slots; while an active one overlaps, the bytes are not free. Stores
 * (2)/(1) and loads (3)/(2) are sequentially consistent on both sides, so at least one of the two sees the other
 * (Dekker). A writer that is stopped between (2) and its last byte keeps its slot active, and the owner can tell. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core.h"
#include "sys.h"

#define PAGE_BYTES 4096
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

typedef struct {
    _Atomic uint64_t state; /* generation << 1 | active */
    _Atomic uint64_t region, off, end;
    uint64_t pad[4];
} hx_slot_t;

struct hx_page {
    _Atomic uint64_t revoke_seq;
    uint64_t pad[7];
    hx_slot_t slots[HX_SLOTS];
};

_Static_assert(sizeof(hx_page_t) <= PAGE_BYTES, "one page");
_Static_assert(sizeof(hx_slot_t) == 64, "one cache line a slot");

static hx_page_t *map_page(int fd)
{
    void *p = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, PAGE_BYTES, MADV_DONTFORK); /* a child must not look like a writer */
    return p;
}

hx_page_t *hx_page_create(int *fd_p)
{
    int fd = hx_memfd("aiohixl-page");
    if (fd < 0)
        return NULL;
    if (ftruncate(fd, PAGE_BYTES) < 0 || fallocate(fd, 0, 0, PAGE_BYTES) < 0 || fcntl(fd, F_ADD_SEALS, SEALS) < 0) {
        close(fd);
        return NULL;
    }
    hx_page_t *page = map_page(fd);
    if (!page) {
        close(fd);
        return NULL;
    }
    *fd_p = fd;
    return page;
}

hx_page_t *hx_page_import(int fd)
{
    struct stat st;
    hx_page_t *page = NULL;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &st) == 0 && st.st_size == PAGE_BYTES && seals >= 0 && (seals & SEALS) == SEALS)
        page = map_page(fd);
    close(fd);
    return page;
}

void hx_page_unmap(hx_page_t *page)
{
    if (page)
        munmap(page, PAGE_BYTES);
}

void hx_page_publish(hx_page_t *page, unsigned slot, uint64_t region, uint64_t off, uint64_t end)
{
    hx_slot_t *s = &page->slots[slot];
    uint64_t gen = (atomic_load_explicit(&s->state, memory_order_relaxed) >> 1) + 1;
    /* Release: whoever sees the new span sees that the slot was cleared before it, and the bytes that had landed by
     * then. */
    atomic_store_explicit(&s->region, region, memory_order_release);
    atomic_store_explicit(&s->off, off, memory_order_release);
    atomic_store_explicit(&s->end, end, memory_order_release);
    atomic_store(&s->state, gen << 1 | 1);
}

void hx_page_clear(hx_page_t *page, unsigned slot)
{
    hx_slot_t *s = &page->slots[slot];
    uint64_t state = atomic_load_explicit(&s->state, memory_order_relaxed);
    atomic_store_explicit(&s->state, state & ~1ull, memory_order_release);
}

uint64_t hx_page_revoke_seq(hx_page_t *page)
{
    return atomic_load(&page->revoke_seq);
}

void hx_page_set_revoke_seq(hx_page_t *page, uint64_t seq)
{
    atomic_store(&page->revoke_seq, seq);
}

uint64_t hx_page_overlap(hx_page_t *page, uint64_t region, uint64_t off, uint64_t end)
{
    uint64_t held = 0;
    for (unsigned i = 0; i < HX_SLOTS; i++) {
        hx_slot_t *s = &page->slots[i];
        uint64_t before = atomic_load(&s->state);
        if (!(before & 1))
            continue;
        uint64_t r = atomic_load(&s->region), lo = atomic_load(&s->off), hi = atomic_load(&s->end);
        if (atomic_load(&s->state) != before || (r != region && r != HX_ANY_REGION))
            continue; /* changed: that copy is over, and the next one reads the new revoke_seq before it starts */
        lo = lo > off ? lo : off;
        hi = hi < end ? hi : end;
        held += hi > lo ? hi - lo : 0;
    }
    return held < end - off ? held : end - off;
}

bool hx_page_busy(hx_page_t *page)
{
    for (unsigned i = 0; i < HX_SLOTS; i++)
        if (atomic_load(&page->slots[i].state) & 1)
            return true;
    return false;
}
