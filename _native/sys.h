/* SPDX-License-Identifier: Apache-2.0 */
/* What older system headers lack, and what several files do with the system alike. Include it after _GNU_SOURCE. */
#ifndef HX_SYS_H
#define HX_SYS_H

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* since Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define HX_POPULATE_STEP (32ull << 20) /* so that close() need not wait for a whole region */

static inline void hx_close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

#endif
