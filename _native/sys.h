/* SPDX-License-Identifier: Apache-2.0 */
/* What older system headers lack, and what several files do with the system alike. Include it after _GNU_SOURCE. */
#ifndef HX_SYS_H
#define HX_SYS_H

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* since Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define HX_POPULATE_STEP (32ull << 20) /* so that close() need not wait for a whole region */

#ifndef MFD_NOEXEC_SEAL /* since Linux 6.3; where vm.memfd_noexec insists, a memfd without it is refused */
#define MFD_NOEXEC_SEAL 0x0008U
#endif

/* A memfd that can be sealed, or -1. */
static inline int hx_memfd(const char *name)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    return fd >= 0 || errno != EINVAL ? fd : memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

static inline void hx_close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Between two looks at what another core is about to change. */
static inline void hx_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
