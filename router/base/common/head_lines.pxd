# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint8_t

cdef uint8_t _CR, _LF, _SPACE, _ZERO, _NINE, _LAST_PRINTABLE
cdef int64_t MAX_DIGITS
cdef bytes _IN_NAME

@cython.locals(size=int64_t, c=uint8_t)
cpdef int64_t line_end(bytes data, int64_t at) noexcept

@cython.locals(value=int64_t, at=int64_t, c=uint8_t)
cpdef int64_t digits(bytes data, int64_t start, int64_t end) noexcept

@cython.locals(at=int64_t)
cpdef bint is_name(bytes data, int64_t start, int64_t end) noexcept

cpdef int64_t value_start(bytes data, int64_t at, int64_t end) noexcept
