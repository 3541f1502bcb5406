/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that are larger than the caches. */
#ifndef HX_COPY_H
#define HX_COPY_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of one operation from which its copies bypass the cache: more than a core's share of it, so the lines would be
 * evicted before anybody reads them, and reading the target's old lines first costs a third of the bandwidth. The C
 * library does the same inside one large memcpy; our chunks are too small for it to notice. */
#define HX_STREAM_FROM (8ull << 20)

void hx_copy_stream(void *dst, const void *src, size_t n);

#endif
