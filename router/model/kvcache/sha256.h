/* SPDX-License-Identifier: Apache-2.0
 * SHA-256 (FIPS 180-4) of one message in memory. On x86-64 it uses the processor's SHA instructions if a check at run
 * time finds them, and plain C otherwise. */
#ifndef KVROUTER_SHA256_H
#define KVROUTER_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SHA256_CHUNK 64
#define SHA256_DIGEST 32

/* Add `chunks` chunks of 64 bytes to the state. */
typedef void (*sha256_compress)(uint32_t state[8], const uint8_t *data, size_t chunks);

/* The fractions of the cube roots of the first 64 primes. */
static const uint32_t sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t sha256_rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void sha256_put(uint8_t *at, uint64_t value, int bytes) {
    while (bytes--) {
        at[bytes] = (uint8_t)value;
        value >>= 8;
    }
}

static void sha256_compress_plain(uint32_t state[8], const uint8_t *data, size_t chunks) {
    for (; chunks; chunks--, data += SHA256_CHUNK) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = (uint32_t)data[4 * i] << 24 | data[4 * i + 1] << 16 | data[4 * i + 2] << 8 | data[4 * i + 3];
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (sha256_rotate(a, 7) ^ sha256_rotate(a, 18) ^ a >> 3) + w[i - 7] +
                   (sha256_rotate(b, 17) ^ sha256_rotate(b, 19) ^ b >> 10);
        }
        memcpy(s, state, sizeof s);
/* When the loop is unrolled, the words of the state stay in registers, and only their names change from round to
 * round. */
#pragma GCC unroll 64
        for (unsigned i = 0; i < 64; i++) {
            uint32_t a = s[-i % 8], b = s[(1 - i) % 8], c = s[(2 - i) % 8], *d = &s[(3 - i) % 8];
            uint32_t e = s[(4 - i) % 8], f = s[(5 - i) % 8], g = s[(6 - i) % 8], *h = &s[(7 - i) % 8];
            *h += (sha256_rotate(e, 6) ^ sha256_rotate(e, 11) ^ sha256_rotate(e, 25)) + (g ^ (e & (f ^ g))) +
                  sha256_k[i] + w[i];
            *d += *h;
            *h += (sha256_rotate(a, 2) ^ sha256_rotate(a, 13) ^ sha256_rotate(a, 22)) + ((a & b) | (c & (a | b)));
        }
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("sha,sse4.1")))
static void sha256_compress_x86(uint32_t state[8], const uint8_t *data, size_t chunks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    /* The instructions expect the words in the order ABEF and CDGH, the highest first. */
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; chunks; chunks--, data += SHA256_CHUNK) {
        __m128i abef_before = abef, cdgh_before = cdgh, w[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            /* w[i % 4] holds words 4i to 4i + 3; the other three hold the words before. */
            __m128i *next = &w[i % 4], second = w[(i + 2) % 4], last = w[(i + 3) % 4];
            if (i < 4)
                *next = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), big_endian);
            else
                *next = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(*next, w[(i + 1) % 4]),
                                                           _mm_alignr_epi8(last, second, 4)), last);
            __m128i wk = _mm_add_epi32(*next, _mm_loadu_si128((const __m128i *)sha256_k + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static sha256_compress sha256_fastest(void) {
    unsigned a, b, c, d, features;
    if (!__get_cpuid(1, &a, &b, &features, &d) || !(features & bit_SSSE3) || !(features & bit_SSE4_1))
        return sha256_compress_plain;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_SHA ? sha256_compress_x86 : sha256_compress_plain;
}
#else
static sha256_compress sha256_fastest(void) { return sha256_compress_plain; }
#endif

static void sha256(sha256_compress compress, const uint8_t *data, size_t size, uint8_t digest[SHA256_DIGEST]) {
    /* The fractions of the square roots of the first 8 primes. */
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t last[2 * SHA256_CHUNK] = {0};
    size_t rest = size % SHA256_CHUNK, padded = rest < SHA256_CHUNK - 8 ? SHA256_CHUNK : 2 * SHA256_CHUNK;
    compress(state, data, size / SHA256_CHUNK);
    memcpy(last, data + size - rest, rest);
    last[rest] = 0x80;
    sha256_put(last + padded - 8, (uint64_t)size * 8, 8);
    compress(state, last, padded / SHA256_CHUNK);
    for (int i = 0; i < 8; i++)
        sha256_put(digest + 4 * i, state[i], 4);
}
#endif
