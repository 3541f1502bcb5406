/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4), HMAC over it (RFC 2104), and what a challenge needs besides. */
#ifndef HX_SHA256_H
#define HX_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define HX_SHA256_NBYTES 32
#define HX_SHA256_BLOCK 64

typedef struct hx_sha256_ctx {
    uint32_t state[8];
    uint64_t nbytes; /* hashed so far; its remainder by the block size is the fill of `block` */
    uint8_t block[HX_SHA256_BLOCK];
} hx_sha256_ctx_t;

void hx_sha256_init(hx_sha256_ctx_t *ctx);
void hx_sha256_update(hx_sha256_ctx_t *ctx, const void *data, size_t nbytes);
/* Writes the digest and wipes the context, which needs hx_sha256_init() before it is used again. */
void hx_sha256_final(hx_sha256_ctx_t *ctx, uint8_t out[HX_SHA256_NBYTES]);

void hx_sha256(const void *data, size_t nbytes, uint8_t out[HX_SHA256_NBYTES]);

/* HMAC of the parts in order, as if they were one buffer: lengths are not hashed, so parts of variable
 * length need a length field of their own. `parts` may be NULL when `nparts` is 0. */
void hx_hmac_sha256(const void *key, size_t key_len, const struct iovec *parts, int nparts,
                    uint8_t out[HX_SHA256_NBYTES]);

/* Takes the same time wherever the first difference is. */
bool hx_equal_ct(const void *a, const void *b, size_t nbytes);

/* Fills `buf` from the kernel's generator; waits only while that is not seeded yet (early boot).
 * False if the kernel refuses: then nothing in `buf` may be used. */
bool hx_random(void *buf, size_t nbytes);

#endif
