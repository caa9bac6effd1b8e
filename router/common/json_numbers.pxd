# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef uint8_t _OPEN, _CLOSE, _COMMA, _MINUS, _ZERO, _NINE, _SPACE
cdef uint64_t _MAX_TENTH, _MAX_LAST, _ALL, _MOST_NEGATIVE
cdef int64_t _SAFE_DIGITS, NOT_PLAIN

@cython.locals(
    end=int64_t, i=int64_t, count=int64_t, expects=int64_t, c=uint8_t, negative=bint, start=int64_t, safe=int64_t,
    value=uint64_t, digit=uint64_t,
)
cdef int64_t parse_integers(const uint8_t[::1] text, uint64_t[::1] out) noexcept nogil
