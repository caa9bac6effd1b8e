# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef int64_t MAX_DIGITS, _ZERO


@cython.final
cdef class QueryTemplate:
    cdef const uint8_t[::1] text
    cdef const int64_t[::1] ends, rows, columns

    @cython.locals(
        numbers=int64_t, out=uint8_t[::1], at=int64_t, start=int64_t, i=int64_t, j=int64_t, number=uint64_t,
        rest=uint64_t,
    )
    cpdef bytes fill(self, const int64_t[:, ::1] found)
