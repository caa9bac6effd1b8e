// SPDX-License-Identifier: Apache-2.0
// Bounds of MessagePack values, and readers for the few values that are needed. Every function takes the rest of the
// payload and moves its beginning past one value. A function returns 0, with the beginning anywhere in the rest, if the
// value is not the expected one, is cut short, or is of a type that plain events do not have.

#ifndef KVROUTER_MSGPACK_VALUES_H
#define KVROUTER_MSGPACK_VALUES_H

#include <stddef.h>
#include <stdint.h>

// A digest shorter than the integer form cannot be reduced to it.
#define MIN_DIGEST_BYTES 8

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} Reader;

typedef struct {
    const uint8_t *at;
    size_t size;
} Span;

static inline size_t left(const Reader *reader) { return (size_t)(reader->end - reader->at); }

// The size of a number, nil or boolean in bytes, by its first byte; 0 for every other type.
static const uint8_t VALUE_BYTES[256] = {
    [0x00 ... 0x7F] = 1, [0xC0] = 1, [0xC2] = 1, [0xC3] = 1, [0xCA] = 5, [0xCB] = 9, [0xCC] = 2, [0xCD] = 3,
    [0xCE] = 5, [0xCF] = 9, [0xD0] = 2, [0xD1] = 3, [0xD2] = 5, [0xD3] = 9, [0xE0 ... 0xFF] = 1,
};

static inline uint64_t big_endian(const uint8_t *at, int size) {
    uint64_t value = 0;
    for (int i = 0; i < size; i++) value = value << 8 | at[i];
    return value;
}

// Reads the length after one of the three markers of a type: in the bits that `mask` leaves of a marker `fix`, in the
// 16 bits after `two`, or in the 32 bits after `four`.
static inline int read_count(Reader *reader, uint8_t fix, uint8_t mask, uint8_t two, uint8_t four, size_t *count) {
    if (left(reader) < 1) return 0;
    uint8_t first = reader->at[0];
    int size = (first & mask) == fix ? 0 : first == two ? 2 : first == four ? 4 : -1;
    if (size < 0 || left(reader) < (size_t)(1 + size)) return 0;
    *count = size ? big_endian(reader->at + 1, size) : (size_t)(first & (uint8_t)~mask);
    reader->at += 1 + size;
    // Each item takes at least one byte.
    return *count <= left(reader);
}

static inline int read_array(Reader *reader, size_t *count) {
    return read_count(reader, 0x90, 0xF0, 0xDC, 0xDD, count);
}

static inline int read_map(Reader *reader, size_t *count) { return read_count(reader, 0x80, 0xF0, 0xDE, 0xDF, count); }

static inline int take(Reader *reader, size_t size, Span *found) {
    if (size > left(reader)) return 0;
    found->at = reader->at;
    found->size = size;
    reader->at += size;
    return 1;
}

static inline int read_text(Reader *reader, Span *text) {
    size_t size;
    if (left(reader) >= 2 && reader->at[0] == 0xD9) {
        size = reader->at[1];
        reader->at += 2;
    } else if (!read_count(reader, 0xA0, 0xE0, 0xDA, 0xDB, &size)) {
        return 0;
    }
    return take(reader, size, text);
}

static inline int read_bytes(Reader *reader, Span *found) {
    if (left(reader) < 1 || reader->at[0] < 0xC4 || reader->at[0] > 0xC6) return 0;
    int width = 1 << (reader->at[0] - 0xC4);
    if (left(reader) < (size_t)(1 + width)) return 0;
    uint64_t size = big_endian(reader->at + 1, width);
    reader->at += 1 + width;
    return take(reader, size, found);
}

// Reads an integer as two's complement.
static inline int read_integer(Reader *reader, uint64_t *value) {
    if (left(reader) < 1) return 0;
    uint8_t first = reader->at[0];
    int size = VALUE_BYTES[first];
    if (first < 0x80 || first >= 0xE0) {
        *value = (uint64_t)(int64_t)(int8_t)first;
    } else if (first >= 0xCC && first <= 0xD3) {
        if (left(reader) < (size_t)size) return 0;
        *value = big_endian(reader->at + 1, size - 1);
        if (first >= 0xD0 && size < 9 && reader->at[1] & 0x80) *value |= ~(uint64_t)0 << (8 * (size - 1));
    } else {
        return 0;
    }
    reader->at += size;
    return 1;
}

// Reads an integer as two's complement, or the last eight bytes of a digest.
static inline int read_hash(Reader *reader, uint64_t *value) {
    Span digest;
    if (read_integer(reader, value)) return 1;
    if (!read_bytes(reader, &digest) || digest.size < MIN_DIGEST_BYTES) return 0;
    *value = big_endian(digest.at + digest.size - 8, 8);
    return 1;
}

static inline int read_hashes(Reader *reader, uint64_t *out, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!read_hash(reader, out + i)) return 0;
    }
    return 1;
}

// Skips one value of at most `depth` levels.
static int skip(Reader *reader, int depth) {
    Span text;
    size_t count;
    if (left(reader) < 1) return 0;
    size_t size = VALUE_BYTES[reader->at[0]];
    if (size) return take(reader, size, &text);
    uint8_t first = reader->at[0];
    if ((first & 0xE0) == 0xA0 || (first >= 0xD9 && first <= 0xDB)) return read_text(reader, &text);
    if (first >= 0xC4 && first <= 0xC6) return read_bytes(reader, &text);
    if (depth == 0) return 0;
    if ((first & 0xF0) == 0x90 || first == 0xDC || first == 0xDD) {
        if (!read_array(reader, &count)) return 0;
    } else {
        if (!read_map(reader, &count)) return 0;
        count *= 2;
    }
    for (size_t i = 0; i < count; i++) {
        // Most bytes of an event are token ids, so numbers are skipped without a call.
        const uint8_t *at = reader->at;
        for (; i < count && at < reader->end; i++) {
            size = VALUE_BYTES[*at];
            if (size == 0 || (size_t)(reader->end - at) < size) break;
            at += size;
        }
        reader->at = at;
        if (i < count && !skip(reader, depth - 1)) return 0;
    }
    return 1;
}

// Returns whether the text is ASCII, which every decoder accepts as text.
static inline int is_ascii(const Span *text) {
    uint8_t bits = 0;
    for (size_t i = 0; i < text->size; i++) bits |= text->at[i];
    return bits < 0x80;
}

#endif
