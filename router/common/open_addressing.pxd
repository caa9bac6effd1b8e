# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

ctypedef fused Values:
    int32_t[::1]
    uint16_t[::1]

cdef uint64_t _LOW32, _MIX1, _MIX2

@cython.locals(x=uint64_t)
cpdef int64_t home(uint64_t key, int64_t capacity) noexcept nogil

@cython.locals(i=int64_t)
cpdef void homes(const uint64_t[::1] keys, int64_t capacity, int64_t[::1] out) noexcept nogil

@cython.locals(capacity=int64_t, i=int64_t, distance=int64_t, gap=int64_t)
cpdef void close_gap(uint64_t[::1] keys, Values values, int64_t empty, int64_t hole) noexcept nogil
