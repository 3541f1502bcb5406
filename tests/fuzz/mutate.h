/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation that knows where a message begins. A harness says how long a message is, where its fields stand, and how a good
 * one is made; half of all mutations are the fuzzer's own, of bytes. libFuzzer finds LLVMFuzzerCustomMutator by its name. */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

typedef struct {
    size_t off, width;
} field_t;

typedef struct {
    size_t preamble; /* bytes of options in front of the messages */
    size_t head;     /* the least that a message has */
    const field_t *fields;
    size_t nfields;
    size_t (*length)(const uint8_t *at, size_t have);            /* of the message there, at most `have` */
    size_t (*make)(uint8_t *out, size_t room, uint64_t *random); /* a good one; 0: no room */
    void (*tweak)(uint8_t *at, size_t n, uint64_t *random);      /* of what follows the head; may be NULL */
} grammar_t;

extern const grammar_t grammar;

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);

static inline uint64_t interesting(uint64_t *random)
{
    static const uint64_t values[] = {0,
                                      1,
                                      2,
                                      3,
                                      4,
                                      5,
                                      7,
                                      8,
                                      15,
                                      16,
                                      17,
                                      255,
                                      256,
                                      4095,
                                      4096,
                                      4097,
                                      65535,
                                      65536,
                                      65537,
                                      1u << 20,
                                      4u << 20,
                                      INT32_MAX,
                                      1ull << 31,
                                      UINT32_MAX,
                                      1ull << 32,
                                      INT64_MAX,
                                      1ull << 63,
                                      UINT64_MAX,
                                      UINT64_MAX - 4095};
    uint64_t v = values[draw_below(random, sizeof values / sizeof *values)];
    return draw_below(random, 4) ? v : v + draw_below(random, 33) - 16;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    enum { MESSAGES = 256 };
    uint64_t random = seed * 0x9e3779b97f4a7c15ull | 1;
    size_t at[MESSAGES + 1], n = 0, pos = grammar.preamble;
    if (size < pos || !draw_below(&random, 8))
        return LLVMFuzzerMutate(data, size, max);
    for (; n < MESSAGES && pos < size; n++) {
        at[n] = pos;
        pos += grammar.length(data + pos, size - pos);
    }
    at[n] = pos;
    size_t one = n ? draw_below(&random, n) : 0, len = n ? at[one + 1] - at[one] : 0;
    uint8_t *message = data + (n ? at[one] : grammar.preamble);
    switch (n ? draw_below(&random, 12) : 0) {
    case 0:
    case 1: { /* one more, in front of it */
        uint8_t *made = malloc(max - size + 1);
        size_t k = grammar.make(made, max - size, &random);
        memmove(message + k, message, (size_t)(data + size - message));
        memcpy(message, made, k);
        free(made);
        return size + k;
    }
    case 2: /* without it */
        memmove(message, message + len, (size_t)(data + size - message) - len);
        return size - len;
    case 3: /* twice */
        if (len > max - size)
            return size;
        memmove(message + len, message, (size_t)(data + size - message));
        return size + len;
    case 4: /* cut off in it */
        return (size_t)(message - data) + draw_below(&random, len + 1);
    case 5:
    case 6:
        return LLVMFuzzerMutate(data, size, max);
    case 7:
    case 8:
        if (grammar.tweak && len > grammar.head) {
            grammar.tweak(message, len, &random);
            return size;
        } /* fall through */
    default: { /* a field of its head */
        const field_t *f = &grammar.fields[draw_below(&random, grammar.nfields)];
        uint64_t v = interesting(&random);
        if (f->off + f->width <= len)
            memcpy(message + f->off, &v, f->width);
        return size;
    }
    }
}

#endif
