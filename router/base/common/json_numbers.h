/* SPDX-License-Identifier: Apache-2.0
 * Arrays of plain integers in JSON (RFC 8259), read without a Python object for each number.
 *
 * Digits are converted eight at a time, in one word. Source: Daniel Lemire and others, simdjson,
 * parse_eight_digits_unrolled.
 */
#ifndef KVROUTER_JSON_NUMBERS_H
#define KVROUTER_JSON_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Every number of this many digits fits 64 bits; no number with two digits more does. */
#define SAFE_DIGITS 19

#define EIGHT(byte) (0x0101010101010101u * (byte))

static const uint64_t powers_of_ten[9] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

static inline int is_space(uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static inline const uint8_t *skip_spaces(const uint8_t *p, const uint8_t *end) {
    while (p < end && is_space(*p))
        p++;
    return p;
}

/* Return the value of the up to eight digits at `p`, and store their number in `*count`. */
static inline uint64_t read_eight(const uint8_t *p, const uint8_t *end, int *count) {
    uint64_t word = 0, value, others;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (end - p >= 8) {
        memcpy(&word, p, 8);
        word ^= EIGHT('0');
        others = ((word & EIGHT(0x7f)) + EIGHT(0x76)) | word;
        others &= EIGHT(0x80);
        *count = others ? __builtin_ctzll(others) / 8 : 8;
        if (!*count)
            return 0;
        /* The first digit is the lowest byte; the shift puts zeros before it. */
        word <<= 64 - 8 * *count;
        word = word * 10 + (word >> 8);
        return ((word & 0x000000ff000000ff) * 0x000f424000000064 +
                (word >> 16 & 0x000000ff000000ff) * 0x0000271000000001) >> 32;
    }
#endif
    (void)word, (void)others;
    value = 0;
    *count = 0;
    while (*count < 8 && p < end && *p >= '0' && *p <= '9') {
        value = value * 10 + (*p++ - '0');
        ++*count;
    }
    return value;
}

/* Read the integer at `p` into `*value`, as two's complement. Return the position behind it, or NULL if there is no
 * integer from -2**63 to 2**64-1. */
static inline const uint8_t *read_integer(const uint8_t *p, const uint8_t *end, uint64_t *value) {
    int is_negative = p < end && *p == '-', count, digits = 0;
    uint64_t sum = 0;
    p += is_negative;
    const uint8_t *start = p;
    do {
        uint64_t part = read_eight(p, end, &count);
        p += count;
        digits += count;
        if (digits > SAFE_DIGITS) {
            if (digits > SAFE_DIGITS + 1 || __builtin_mul_overflow(sum, powers_of_ten[count], &sum) ||
                __builtin_add_overflow(sum, part, &sum))
                return NULL;
        } else
            sum = sum * powers_of_ten[count] + part;
    } while (count == 8);
    if (!digits || (digits > 1 && *start == '0') || (is_negative && sum > (uint64_t)1 << 63))
        return NULL;
    *value = is_negative ? 0 - sum : sum;
    return p;
}

/* Read the array at `p` into `out`, which must have room for half as many integers as there are bytes, and one more.
 * Return the position behind the array, or NULL if it is not an array of integers. */
static const uint8_t *read_integers(const uint8_t *p, const uint8_t *end, uint64_t *out, size_t *count) {
    uint64_t *first = out;
    if (p == end || *p++ != '[')
        return NULL;
    p = skip_spaces(p, end);
    if (p < end && *p == ']') {
        *count = 0;
        return p + 1;
    }
    for (;;) {
        p = read_integer(p, end, out++);
        if (p == NULL)
            return NULL;
        if (p < end && is_space(*p))
            p = skip_spaces(p, end);
        if (p == end)
            return NULL;
        if (*p == ']') {
            *count = (size_t)(out - first);
            return p + 1;
        }
        if (*p++ != ',')
            return NULL;
        if (p < end && is_space(*p))
            p = skip_spaces(p, end);
    }
}

/* Return the position behind the string whose first quote is at `p`, or NULL if the string does not end. */
static const uint8_t *skip_string(const uint8_t *p, const uint8_t *end) {
    for (p++; p < end; p++) {
        p = memchr(p, '"', (size_t)(end - p));
        if (p == NULL)
            return NULL;
        const uint8_t *before = p;
        while (before[-1] == '\\')
            before--;
        if ((p - before) % 2 == 0)
            return p + 1;
    }
    return NULL;
}

/* Return the position behind the value at `p`, judged by its quotes and brackets alone, or NULL if it does not end. */
static const uint8_t *skip_value(const uint8_t *p, const uint8_t *end) {
    size_t depth = 0;
    while (p < end) {
        switch (*p) {
        case '"':
            p = skip_string(p, end);
            if (p == NULL)
                return NULL;
            continue;
        case '[':
        case '{':
            depth++;
            break;
        case ']':
        case '}':
            if (!depth--)
                return p;
            break;
        case ',':
            if (!depth)
                return p;
        }
        p++;
    }
    return NULL;
}

/* Find the one field of the object at `p` that has one of these names, and read its array of integers into `out`.
 * Store the start of the array in `*from` and its end in `*to`. Return the index of the field's name in `names`.
 * Return -1 if there is not exactly one such field, if it is not such an array, if the name of any field contains an
 * escape, or if the object is incomplete. The values of the other fields are not validated. */
static int find_integers(const uint8_t *p, const uint8_t *end, const char *const *names, int name_count,
                         uint64_t *out, size_t *count, const uint8_t **from, const uint8_t **to) {
    int found = -1;
    p = skip_spaces(p, end);
    if (p == end || *p++ != '{')
        return -1;
    for (;;) {
        p = skip_spaces(p, end);
        if (p == end || *p != '"')
            return -1;
        const uint8_t *name = p + 1;
        p = skip_string(p, end);
        if (p == NULL)
            return -1;
        size_t name_bytes = (size_t)(p - 1 - name);
        /* A name with an escape may still equal one of the names. */
        if (memchr(name, '\\', name_bytes))
            return -1;
        p = skip_spaces(p, end);
        if (p == end || *p++ != ':')
            return -1;
        p = skip_spaces(p, end);
        int field = 0;
        while (field < name_count && (strlen(names[field]) != name_bytes || memcmp(names[field], name, name_bytes)))
            field++;
        if (field < name_count) {
            if (found >= 0)
                return -1;
            found = field;
            *from = p;
            p = *to = read_integers(p, end, out, count);
        } else
            p = skip_value(p, end);
        if (p == NULL)
            return -1;
        p = skip_spaces(p, end);
        if (p == end)
            return -1;
        if (*p == '}')
            return skip_spaces(p + 1, end) == end ? found : -1;
        if (*p++ != ',')
            return -1;
    }
}
#endif
