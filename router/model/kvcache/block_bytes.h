/* SPDX-License-Identifier: Apache-2.0
 * A block, (parent, token ids, extra keys), as CPython's pickle.dumps(protocol=5) and cbor2.dumps(canonical=True) write
 * it. The caller provides the last part, from the extra keys on.
 *
 * Source: CPython 3.11 Modules/_pickle.c (save_long, save_bytes, save_tuple, _Pickler_CommitFrame); RFC 8949 section 3.
 */
#ifndef KVROUTER_BLOCK_BYTES_H
#define KVROUTER_BLOCK_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Pickle writes a longer parent with another opcode. */
#define MAX_PARENT_BYTES 255
/* Pickle splits a longer output into several frames. */
#define MAX_FRAME_BYTES (1 << 16)
/* The most bytes that an id below 2**63 takes, namely as LONG1. */
#define MAX_ID_BYTES 10
/* More than the opcodes, the heads of arrays and the surplus bytes written after the last id. */
#define MAX_OTHER_BYTES 48

#define PICKLE_HEAD_BYTES 11

/* put_little and put_big always write 8 bytes, and the next value overwrites the surplus ones, because processors
 * predict a branch on the width of an id badly. */
static inline void put_little(uint8_t *p, uint64_t value) {
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(value >> 8 * i);
}

static inline void put_big(uint8_t *p, uint64_t value) {
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(value >> (56 - 8 * i));
}

static inline uint64_t get_big(const uint8_t *p) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | p[i];
    return value;
}

static inline uint8_t *put_pickled(uint8_t *p, uint64_t id) {
    if (id >> 31 == 0) {
        int width = (id > 0xff) + (id > 0xffff);
        p[0] = "KMJ"[width];
        put_little(p + 1, id);
        return p + 1 + (1 << width);
    }
    /* LONG1 is signed, so its highest bit must stay 0. */
    int size = 5;
    while (size < 8 && id >> (8 * size - 1))
        size++;
    p[0] = 0x8a;
    p[1] = (uint8_t)size;
    put_little(p + 2, id);
    return p + 2 + size;
}

static inline uint8_t *put_cbor(uint8_t *p, int kind, uint64_t value) {
    int width = (value > 0xff) + (value > 0xffff) + (value > 0xffffffff);
    if (value < 24) {
        *p = (uint8_t)(kind | value);
        return p + 1;
    }
    *p = (uint8_t)(kind | (24 + width));
    put_big(p + 1, value << (64 - (8 << width)));
    return p + 1 + (1 << width);
}

static uint8_t *put_bytes(uint8_t *p, const uint8_t *bytes, size_t size) {
    memcpy(p, bytes, size);
    return p + size;
}

static uint8_t *put_block_pickled(uint8_t *start, const uint8_t *parent, size_t parent_bytes, const int64_t *ids,
                                  size_t count, const uint8_t *ending, size_t ending_bytes) {
    uint8_t *p = start + PICKLE_HEAD_BYTES;
    *p++ = 'C';
    *p++ = (uint8_t)parent_bytes;
    p = put_bytes(p, parent, parent_bytes);
    *p++ = 0x94;
    if (count > 3)
        *p++ = '(';
    for (size_t i = 0; i < count; i++)
        p = put_pickled(p, (uint64_t)ids[i]);
    *p++ = count > 3 ? 't' : (uint8_t)(0x84 + count);
    *p++ = 0x94;
    p = put_bytes(p, ending, ending_bytes);
    put_bytes(start, (const uint8_t *)"\x80\x05\x95", 3);
    put_little(start + 3, (uint64_t)(p - start) - PICKLE_HEAD_BYTES);
    return p;
}

static uint8_t *put_block_cbor(uint8_t *p, const uint8_t *parent, size_t parent_bytes, const int64_t *ids,
                               size_t count, const uint8_t *ending, size_t ending_bytes) {
    p = put_cbor(p, 0x80, 3);
    p = put_cbor(p, 0x40, parent_bytes);
    p = put_bytes(p, parent, parent_bytes);
    p = put_cbor(p, 0x80, count);
    for (size_t i = 0; i < count; i++)
        p = put_cbor(p, 0, (uint64_t)ids[i]);
    return put_bytes(p, ending, ending_bytes);
}

/* Write the ids of one page of SGLang, each below 2**32; with `bigrams`, each id is followed by its successor. */
static uint8_t *put_page(uint8_t *p, const int64_t *ids, size_t count, int bigrams) {
    for (size_t i = 0; i < count; i++) {
        for (size_t j = i; j <= i + (bigrams != 0); j++) {
            for (int byte = 0; byte < 4; byte++)
                *p++ = (uint8_t)((uint64_t)ids[j] >> 8 * byte);
        }
    }
    return p;
}
#endif
