/* SPDX-License-Identifier: Apache-2.0 */
/* Small rather than fast: it runs a few times per control link, never on transferred bytes. */
#include "sha256.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

/* Fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2). */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t x, unsigned n)
{
    return (x >> n) | (x << (32 - n));
}

static uint32_t load_be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t x)
{
    p[0] = (uint8_t)(x >> 24);
    p[1] = (uint8_t)(x >> 16);
    p[2] = (uint8_t)(x >> 8);
    p[3] = (uint8_t)x;
}

static void compress(uint32_t state[8], const uint8_t block[HX_SHA256_BLOCK])
{
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] = load_be32(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
        uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }

    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; i++) {
        uint32_t sum1 = rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25);
        uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + K[i] + w[i];
        uint32_t sum0 = rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22);
        uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + t1;
        d = c;
        c = b;
        b = a;
        a = t1 + t2;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
    explicit_bzero(w, sizeof w); /* the schedule begins with the block, which may be the key */
}

void hx_sha256_init(hx_sha256_ctx_t *ctx)
{
    /* Fractional parts of the square roots of the first 8 primes (FIPS 180-4, 5.3.3). */
    static const uint32_t initial[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    memcpy(ctx->state, initial, sizeof initial);
    ctx->nbytes = 0;
}

void hx_sha256_update(hx_sha256_ctx_t *ctx, const void *data, size_t nbytes)
{
    if (nbytes == 0)
        return; /* `data` may be NULL then, which memcpy may not see */
    const uint8_t *p = data;
    size_t fill = ctx->nbytes % HX_SHA256_BLOCK;
    ctx->nbytes += nbytes;

    if (fill > 0) {
        size_t room = HX_SHA256_BLOCK - fill;
        if (nbytes < room) {
            memcpy(ctx->block + fill, p, nbytes);
            return;
        }
        memcpy(ctx->block + fill, p, room);
        compress(ctx->state, ctx->block);
        p += room;
        nbytes -= room;
    }
    for (; nbytes >= HX_SHA256_BLOCK; p += HX_SHA256_BLOCK, nbytes -= HX_SHA256_BLOCK)
        compress(ctx->state, p);
    if (nbytes > 0)
        memcpy(ctx->block, p, nbytes);
}

void hx_sha256_final(hx_sha256_ctx_t *ctx, uint8_t out[HX_SHA256_NBYTES])
{
    /* Padding: one set bit, zeros, and the length in bits as the last 8 bytes of a block. */
    uint64_t nbits = ctx->nbytes * 8;
    size_t fill = ctx->nbytes % HX_SHA256_BLOCK;
    ctx->block[fill++] = 0x80;
    if (fill > HX_SHA256_BLOCK - 8) {
        memset(ctx->block + fill, 0, HX_SHA256_BLOCK - fill);
        compress(ctx->state, ctx->block);
        fill = 0;
    }
    memset(ctx->block + fill, 0, HX_SHA256_BLOCK - 8 - fill);
    store_be32(ctx->block + HX_SHA256_BLOCK - 8, (uint32_t)(nbits >> 32));
    store_be32(ctx->block + HX_SHA256_BLOCK - 4, (uint32_t)nbits);
    compress(ctx->state, ctx->block);

    for (int i = 0; i < 8; i++)
        store_be32(out + 4 * i, ctx->state[i]);
    explicit_bzero(ctx, sizeof *ctx);
}

void hx_sha256(const void *data, size_t nbytes, uint8_t out[HX_SHA256_NBYTES])
{
    hx_sha256_ctx_t ctx;
    hx_sha256_init(&ctx);
    hx_sha256_update(&ctx, data, nbytes);
    hx_sha256_final(&ctx, out);
}

void hx_hmac_sha256(const void *key, size_t key_len, const struct iovec *parts, int nparts,
                    uint8_t out[HX_SHA256_NBYTES])
{
    uint8_t pad[HX_SHA256_BLOCK] = {0};
    if (key_len > HX_SHA256_BLOCK)
        hx_sha256(key, key_len, pad);
    else if (key_len > 0)
        memcpy(pad, key, key_len);

    hx_sha256_ctx_t ctx;
    uint8_t inner[HX_SHA256_NBYTES];
    for (size_t i = 0; i < sizeof pad; i++)
        pad[i] ^= 0x36;
    hx_sha256_init(&ctx);
    hx_sha256_update(&ctx, pad, sizeof pad);
    for (int i = 0; i < nparts; i++)
        hx_sha256_update(&ctx, parts[i].iov_base, parts[i].iov_len);
    hx_sha256_final(&ctx, inner);

    for (size_t i = 0; i < sizeof pad; i++)
        pad[i] ^= 0x36 ^ 0x5c;
    hx_sha256_init(&ctx);
    hx_sha256_update(&ctx, pad, sizeof pad);
    hx_sha256_update(&ctx, inner, sizeof inner);
    hx_sha256_final(&ctx, out);
    explicit_bzero(pad, sizeof pad);
}

bool hx_equal_ct(const void *a, const void *b, size_t nbytes)
{
    /* volatile: the compiler may not turn the loop into one that stops early */
    const volatile uint8_t *x = a, *y = b;
    uint8_t differ = 0;
    for (size_t i = 0; i < nbytes; i++)
        differ |= (uint8_t)(x[i] ^ y[i]);
    return differ == 0;
}

bool hx_random(void *buf, size_t nbytes)
{
    uint8_t *p = buf;
    while (nbytes > 0) {
        ssize_t n = getrandom(p, nbytes, 0); /* short above 256 bytes when a signal comes */
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return false;
        }
        p += n;
        nbytes -= (size_t)n;
    }
    return true;
}
