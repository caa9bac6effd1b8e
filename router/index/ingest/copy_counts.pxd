# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from kvrouter.router.base.common.open_addressing cimport OrderedSlots, spread

cdef int64_t _MOST


@cython.final
cdef class CopyTable:
    cdef OrderedSlots held, counted
    cdef int64_t zeros
    cdef readonly int64_t multiple, absent

    @cython.locals(start=int64_t, end=int64_t, h=int64_t)
    cdef void count_up(self, const uint64_t[::1] hashes, uint64_t[::1] keys, uint16_t[::1] now) except *

    @cython.locals(start=int64_t, end=int64_t, h=int64_t)
    cdef void count_down(self, const uint64_t[::1] hashes, uint64_t[::1] keys, uint16_t[::1] was) noexcept

    @cython.locals(h=int64_t)
    cdef void count_set(self, const uint64_t[::1] hashes, uint64_t[::1] keys, const uint16_t[::1] counts) except *

    @cython.locals(copies=int64_t)
    cdef int64_t add_one(self, uint64_t key) except -1

    @cython.locals(copies=int64_t, slot=int64_t)
    cdef int64_t remove_one(self, uint64_t key) noexcept

    @cython.locals(slot=int64_t)
    cdef int64_t copies(self, uint64_t key) noexcept nogil

    @cython.locals(slot=int64_t)
    cdef void count(self, uint64_t key, int64_t copies) except *
