// SPDX-License-Identifier: Apache-2.0
// Every function of msgpack_values.h over pieces of real batches, mutated, each in memory of exactly its size, so that a
// sanitizer sees any byte that is read beyond it. Arguments: a file of batches, how many pieces, a seed.

#include "msgpack_values.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PIECE 200
#define MAX_HASHES 1000
#define DEPTH 6

// First bytes that announce what may not be there.
static const uint8_t LENGTHS[] = {0x8F, 0x9F, 0xBF, 0xC4, 0xC5, 0xC6, 0xCF, 0xD3, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF};

static uint64_t state;

// xorshift64: Marsaglia, "Xorshift RNGs", 2003.
static uint64_t draw(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static int read_one(Reader *reader) {
    uint64_t value;
    size_t count;
    Span span;
    switch (draw(6)) {
    case 0: return skip(reader, DEPTH);
    case 1: return read_hash(reader, &value);
    case 2: return read_text(reader, &span) && is_ascii(&span) >= 0;
    case 3: return read_map(reader, &count);
    case 4: return read_integer(reader, &value);
    }
    if (!read_array(reader, &count) || count > MAX_HASHES) return 0;
    uint64_t *hashes = malloc(count * sizeof(uint64_t) + 1);
    Reader again = *reader;
    read_hashes(&again, hashes, count);
    free(hashes);
    return 1;
}

int main(int argc, char **argv) {
    static uint8_t batches[1 << 16];
    FILE *file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    if (file == NULL) return 2;
    size_t size = fread(batches, 1, sizeof batches, file);
    state = strtoull(argv[3], NULL, 10) | 1;
    unsigned long read = 0;
    for (long i = atol(argv[2]); i > 0; i--) {
        size_t length = 1 + draw(MAX_PIECE);
        uint8_t *piece = malloc(length);
        memcpy(piece, batches + draw(size - length), length);
        for (uint64_t changes = draw(5); changes > 0; changes--)
            piece[draw(length)] = draw(2) ? (uint8_t)draw(256) : LENGTHS[draw(sizeof LENGTHS)];
        Reader reader = {piece, piece + length};
        while (left(&reader)) {
            const uint8_t *start = reader.at;
            int found = read_one(&reader);
            if (reader.at < start || reader.at > reader.end) return 3;
            read += found;
            if (!found || reader.at == start) reader.at = start + 1;
        }
        free(piece);
    }
    printf("%lu\n", read);
    return 0;
}
