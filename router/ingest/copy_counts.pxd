# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from kvrouter.router.common.open_addressing cimport close_gap, home

cdef int64_t _MOST


@cython.final
cdef class CopyTable:
    cdef uint64_t[::1] keys
    cdef uint16_t[::1] counts
    cdef int64_t used
    cdef readonly int64_t several, absent

    @cython.locals(capacity=int64_t, i=int64_t)
    cdef int64_t place_of(self, uint64_t key) noexcept nogil

    @cython.locals(h=int64_t, i=int64_t)
    cdef void count_up(self, const uint64_t[::1] hashes, uint16_t[::1] now) noexcept nogil

    @cython.locals(h=int64_t, i=int64_t)
    cdef void count_down(self, const uint64_t[::1] hashes, uint16_t[::1] was) noexcept nogil

    @cython.locals(h=int64_t, i=int64_t)
    cdef void count_set(self, const uint64_t[::1] hashes, const uint16_t[::1] counts) noexcept nogil

    cdef make_room(self, count)
