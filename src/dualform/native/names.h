/* Names of vectors: equal ones have the same, others do not. */
#pragma once
#include "loops.h"

enum { WORDS = 8 }; /* that are looked at side by side */

static const uint64_t name_a = 0x87c37b91114253d5u, name_b = 0x4cf5ad432745937fu;

static inline uint64_t turned(uint64_t x, int by) { return x << by | x >> (64 - by); }

/* The last step of MurmurHash3: each bit changes half of the others. */
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

/* A vector's name: 128 bits of its bytes and a seed. Two sums for each of the words that stand side by side, so that a processor adds
   many of them at a time; each step can be undone, so that words that differ once leave sums that differ. */
LOOP void name_of(const unsigned char *x, int64_t bytes, uint64_t seed, uint64_t name[2]) {
    uint64_t a[WORDS], b[WORDS], words[WORDS];
    for (int j = 0; j < WORDS; j++) {
        a[j] = mixed(seed + 2 * (uint64_t)j + 1);
        b[j] = mixed(seed + 2 * (uint64_t)j + 2);
    }
    for (int64_t left = bytes; left > 0; left -= sizeof words, x += sizeof words) {
        if (left >= (int64_t)sizeof words)
            memcpy(words, x, sizeof words); /* of a length that is known: no call */
        else {
            memset(words, 0, sizeof words);
            memcpy(words, x, (size_t)left);
        }
        for (int j = 0; j < WORDS; j++) a[j] = turned(a[j] ^ words[j], 29) * name_a;
        for (int j = 0; j < WORDS; j++) b[j] = turned(b[j] + words[j], 31) * name_b;
    }
    uint64_t first = (uint64_t)bytes, second = ~(uint64_t)bytes;
    for (int j = 0; j < WORDS; j++) {
        first = mixed(first ^ a[j]) + b[j];
        second = mixed(second ^ b[j]) + a[j];
    }
    name[0] = mixed(first + turned(second, 32));
    name[1] = mixed(second ^ turned(first, 17));
}
