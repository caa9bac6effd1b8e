# SPDX-License-Identifier: Apache-2.0
"""Arrays of plain integers in JSON, in C; `json_numbers.py` documents the functions."""

import numpy as np

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint8_t, uint64_t

cdef extern from "json_numbers.h" nogil:
    const uint8_t *skip_spaces(const uint8_t *p, const uint8_t *end) noexcept
    const uint8_t *read_integers(const uint8_t *p, const uint8_t *end, uint64_t *out, size_t *count) noexcept
    int find_integers(
        const uint8_t *p, const uint8_t *end, const char *const *names, int name_count, uint64_t *out, size_t *count,
        const uint8_t **start, const uint8_t **stop,
    ) noexcept

cdef enum:
    MAX_NAMES = 4
    # From this size (0.3 ms of reading), other threads run meanwhile. For less, reacquiring the interpreter's lock
    # would cost more than it saves.
    LONG_BYTES = 128 * 1024


def integers_of(const uint8_t[::1] raw not None):
    cdef Py_ssize_t size = raw.shape[0]
    cdef size_t count = 0
    cdef uint64_t[::1] room
    if size == 0:
        return None
    out = np.empty(size // 2 + 1, np.uint64)
    room = out
    cdef const uint8_t *end = &raw[0] + size
    cdef const uint8_t *at = skip_spaces(&raw[0], end)
    if size < LONG_BYTES:
        at = read_integers(at, end, &room[0], &count)
    else:
        with nogil:
            at = read_integers(at, end, &room[0], &count)
    if at == NULL or skip_spaces(at, end) != end:
        return None
    return out[:count]


def split_integers(bytes data not None, Py_ssize_t start, tuple names not None):
    cdef const uint8_t *first = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef const uint8_t *end = first + len(data)
    cdef const uint8_t *array = NULL
    cdef const uint8_t *behind = NULL
    cdef const char *wanted[MAX_NAMES]
    cdef Py_ssize_t i
    cdef size_t count = 0
    cdef uint64_t[::1] room
    if not 0 <= start <= len(data) or len(names) > MAX_NAMES:
        raise ValueError(f"start {start} of {len(data)} bytes, {len(names)} names")
    for i in range(len(names)):
        wanted[i] = PyBytes_AS_STRING(names[i])
    out = np.empty((len(data) - start) // 2 + 1, np.uint64)
    room = out
    cdef int found
    cdef int name_count = <int>len(names)
    if end - first - start < LONG_BYTES:
        found = find_integers(first + start, end, wanted, name_count, &room[0], &count, &array, &behind)
    else:
        with nogil:
            found = find_integers(first + start, end, wanted, name_count, &room[0], &count, &array, &behind)
    if found < 0:
        return None
    return data[start : array - first] + b"null" + data[behind - first :], found, out[:count]


def all_bits(const uint64_t[::1] ids not None):
    cdef uint64_t found = 0
    cdef Py_ssize_t i
    for i in range(ids.shape[0]):
        found |= ids[i]
    return found
