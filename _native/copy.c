/* SPDX-License-Identifier: Apache-2.0 */
#include "copy.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE 64
#define AHEAD 512

__attribute__((target("avx"))) static void stream_avx(uint8_t *d, const uint8_t *s, size_t lines)
{
    for (; lines; lines--, d += LINE, s += LINE) {
        _mm_prefetch((const char *)s + AHEAD, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)s);
        __m256i b = _mm256_loadu_si256((const __m256i *)(s + 32));
        _mm256_stream_si256((__m256i *)d, a);
        _mm256_stream_si256((__m256i *)(d + 32), b);
    }
}

static void stream_sse2(uint8_t *d, const uint8_t *s, size_t lines)
{
    for (; lines; lines--, d += LINE, s += LINE) {
        _mm_prefetch((const char *)s + AHEAD, _MM_HINT_NTA);
        for (int i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(d + i), _mm_loadu_si128((const __m128i *)(s + i)));
    }
}

void hx_copy_stream(void *dst, const void *src, size_t n)
{
    uint8_t *d = dst;
    const uint8_t *s = src;
    size_t head = (LINE - (uintptr_t)d % LINE) % LINE;
    if (n < 16 * LINE) {
        memcpy(d, s, n);
        return;
    }
    memcpy(d, s, head);
    d += head, s += head, n -= head;
    size_t lines = n / LINE;
    if (__builtin_cpu_supports("avx"))
        stream_avx(d, s, lines);
    else
        stream_sse2(d, s, lines);
    memcpy(d + lines * LINE, s + lines * LINE, n % LINE);
    _mm_sfence(); /* streaming stores are not ordered with the stores that publish the completion */
}

#else

void hx_copy_stream(void *dst, const void *src, size_t n)
{
    memcpy(dst, src, n);
}

#endif
