/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32C (Castagnoli: polynomial 0x1EDC6F41, reflected), as in RFC 3720 appendix B.4; with the CPU's instruction where it
 * has one. */
#ifndef HX_CRC32C_H
#define HX_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Begins with 0; the value of a concatenation is that of its parts in turn. */
uint32_t hx_crc32c(uint32_t crc, const void *data, size_t nbytes);

#endif
