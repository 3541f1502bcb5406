/* SPDX-License-Identifier: Apache-2.0 */
/* Published vectors (FIPS 180-4 examples, RFC 4231), and one digest over every fill of a block, which was
 * computed with Python's hashlib. */
#include "sha256.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int checks, failures;

static void check(bool ok, const char *what)
{
    checks++;
    if (!ok) {
        failures++;
        fprintf(stderr, "FAILED: %s\n", what);
    }
}

static void check_hex(const uint8_t digest[HX_SHA256_NBYTES], const char *expected, const char *what)
{
    char hex[2 * HX_SHA256_NBYTES + 1];
    for (int i = 0; i < HX_SHA256_NBYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    /* A prefix is enough: RFC 4231 gives one case truncated. */
    bool ok = strncmp(hex, expected, strlen(expected)) == 0;
    check(ok, what);
    if (!ok)
        fprintf(stderr, "  got      %s\n  expected %s\n", hex, expected);
}

static void test_digests(void)
{
    static const struct {
        const char *text, *hex;
    } vectors[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
         "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
    };
    uint8_t out[HX_SHA256_NBYTES];
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        hx_sha256(vectors[i].text, strlen(vectors[i].text), out);
        check_hex(out, vectors[i].hex, vectors[i].text);
    }

    hx_sha256(NULL, 0, out);
    check_hex(out, vectors[0].hex, "NULL of length 0");

    hx_sha256_ctx_t ctx;
    hx_sha256_init(&ctx);
    for (int i = 0; i < 1000; i++) {
        uint8_t chunk[1000];
        memset(chunk, 'a', sizeof chunk);
        hx_sha256_update(&ctx, chunk, sizeof chunk);
    }
    hx_sha256_final(&ctx, out);
    check_hex(out, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", "a million times a");
}

enum { LONGEST = 300 };

static void fill(uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(7 * i + 3);
}

static void test_every_length(void)
{
    uint8_t bytes[LONGEST], out[HX_SHA256_NBYTES];
    fill(bytes, sizeof bytes);
    hx_sha256_ctx_t all;
    hx_sha256_init(&all);
    for (size_t n = 0; n <= LONGEST; n++) {
        hx_sha256(bytes, n, out);
        hx_sha256_update(&all, out, sizeof out);
    }
    hx_sha256_final(&all, out);
    check_hex(out, "7d917fbd2cf49ddff9ad0a8706bba32d204e92e71d2e369c5a03d6af29278c9f", "digest of 301 digests");
}

static void test_every_split(void)
{
    uint8_t bytes[LONGEST], whole[HX_SHA256_NBYTES], out[HX_SHA256_NBYTES];
    fill(bytes, sizeof bytes);
    hx_sha256(bytes, sizeof bytes, whole);
    for (size_t i = 0; i <= LONGEST; i++) {
        for (size_t j = i; j <= LONGEST; j += 13) {
            hx_sha256_ctx_t ctx;
            hx_sha256_init(&ctx);
            hx_sha256_update(&ctx, bytes, i);
            hx_sha256_update(&ctx, bytes + i, j - i);
            hx_sha256_update(&ctx, bytes + j, LONGEST - j);
            hx_sha256_final(&ctx, out);
            if (memcmp(out, whole, sizeof out) != 0) {
                fprintf(stderr, "split at %zu and %zu\n", i, j);
                check(false, "the same digest however the input is split");
                return;
            }
        }
    }
    check(true, "the same digest however the input is split");
}

static void test_hmac_rfc4231(void)
{
    uint8_t ascending[25], out[HX_SHA256_NBYTES];
    for (int i = 0; i < 25; i++)
        ascending[i] = (uint8_t)(i + 1);
    uint8_t key_0b[20], key_0c[20], key_aa[131], data_dd[50], data_cd[50];
    memset(key_0b, 0x0b, sizeof key_0b);
    memset(key_0c, 0x0c, sizeof key_0c);
    memset(key_aa, 0xaa, sizeof key_aa);
    memset(data_dd, 0xdd, sizeof data_dd);
    memset(data_cd, 0xcd, sizeof data_cd);
    const char *short_text = "Test Using Larger Than Block-Size Key - Hash Key First";
    const char *long_text = "This is a test using a larger than block-size key and a larger than block-size data. "
                            "The key needs to be hashed before being used by the HMAC algorithm.";
    const struct {
        const void *key;
        size_t key_len;
        const void *data;
        size_t nbytes;
        const char *hex;
    } cases[] = {
        {key_0b, 20, "Hi There", 8, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {"Jefe", 4, "what do ya want for nothing?", 28,
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {key_aa, 20, data_dd, 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {ascending, 25, data_cd, 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {key_0c, 20, "Test With Truncation", 20, "a3b6167473100ee06e0c796c2955552b"},
        {key_aa, 131, short_text, strlen(short_text),
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {key_aa, 131, long_text, strlen(long_text), "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char what[32];
        snprintf(what, sizeof what, "RFC 4231 case %zu", i + 1);
        struct iovec part = {(void *)cases[i].data, cases[i].nbytes};
        hx_hmac_sha256(cases[i].key, cases[i].key_len, &part, 1, out);
        check_hex(out, cases[i].hex, what);
    }
}

static void test_hmac_edges(void)
{
    uint8_t key[65], out[HX_SHA256_NBYTES];
    memset(key, 'k', sizeof key);
    struct iovec x = {(void *)"x", 1};
    hx_hmac_sha256(key, 64, &x, 1, out);
    check_hex(out, "f91c4c403625fb06910ef93999265bbd2d62baeaec6ff36455498cc124fe3e66", "key of one block");
    hx_hmac_sha256(key, 65, &x, 1, out);
    check_hex(out, "75092ca3ee2b307470c227697b42b3e65376aa3bae98fb5a1f7b7536daa9588a", "key of one byte more");
    hx_hmac_sha256(NULL, 0, NULL, 0, out);
    check_hex(out, "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad", "nothing at all");

    struct iovec parts[] = {{(void *)"Hi", 2}, {NULL, 0}, {(void *)" Th", 3}, {(void *)"ere", 3}};
    memset(key, 0x0b, 20);
    hx_hmac_sha256(key, 20, parts, 4, out);
    check_hex(out, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", "parts, one of them empty");
}

static void test_equal(void)
{
    uint8_t a[HX_SHA256_NBYTES], b[HX_SHA256_NBYTES];
    fill(a, sizeof a);
    memcpy(b, a, sizeof b);
    check(hx_equal_ct(a, b, sizeof a), "equal bytes are equal");
    check(hx_equal_ct(a, NULL, 0), "no bytes are equal");
    for (size_t i = 0; i < sizeof b; i++) {
        for (int bit = 0; bit < 8; bit++) {
            b[i] ^= (uint8_t)(1 << bit);
            check(!hx_equal_ct(a, b, sizeof a), "one bit's difference is seen");
            check(hx_equal_ct(a, b, i), "and not before its place");
            b[i] ^= (uint8_t)(1 << bit);
        }
    }
}

static void test_random(void)
{
    enum { N = 4096 };
    uint8_t *a = malloc(N), *b = malloc(N); /* on the heap: the sanitizer sees a write past the end */
    check(a != NULL && b != NULL, "memory for the test");
    if (a != NULL && b != NULL) {
        memset(a, 0, N);
        memset(b, 0, N);
        check(hx_random(a, N) && hx_random(b, N), "the kernel gives random bytes");
        check(memcmp(a, b, N) != 0, "twice the same is not random");
        size_t zeros = 0;
        for (size_t i = 0; i < N; i++)
            zeros += a[i] == 0;
        check(zeros < 100, "all of the buffer is filled"); /* 16 expected; 100 has a chance below 1e-40 */
        check(hx_random(NULL, 0), "no bytes are always given");
    }
    free(a);
    free(b);
}

int main(void)
{
    test_digests();
    test_every_length();
    test_every_split();
    test_hmac_rfc4231();
    test_hmac_edges();
    test_equal();
    test_random();
    printf("test_sha256: %d checks, %d failures\n", checks, failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
