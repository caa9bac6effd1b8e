# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint64_t

cdef uint64_t _LINE, _LOW32, _MIX1, _MIX2

@cython.locals(i=int64_t, low=uint64_t, high=uint64_t)
cpdef void spread(const uint64_t[::1] hashes, uint64_t[::1] out) noexcept nogil


@cython.final
cdef class OrderedSlots:
    cdef uint64_t[::1] words
    cdef readonly int64_t width, used, lines, line_slots, end, layouts
    cdef object memory
    cdef int64_t most
    cdef uint64_t touched
    cdef double max_load

    cpdef int64_t bytes(self) noexcept
    cpdef int64_t lines_for(self, int64_t count)
    cdef int64_t home(self, uint64_t key) noexcept nogil

    @cython.locals(width=int64_t, line_slots=int64_t, end=int64_t, i=int64_t, home=int64_t)
    cdef int64_t end_with(self, int64_t lines) noexcept nogil

    @cython.locals(width=int64_t, line_slots=int64_t, end=int64_t, i=int64_t, k=int64_t, home=int64_t)
    cdef void copy_to(self, uint64_t[::1] new, int64_t lines) noexcept nogil

    @cython.locals(seen=uint64_t, h=int64_t)
    cdef void touch(self, const uint64_t[::1] keys, int64_t start, int64_t end) noexcept nogil

    @cython.locals(width=int64_t, last=int64_t, i=int64_t)
    cdef int64_t find(self, uint64_t key) noexcept nogil

    @cython.locals(at=int64_t)
    cdef bint has(self, int64_t slot, uint64_t key) noexcept nogil

    @cython.locals(slot=int64_t)
    cdef int64_t place(self, uint64_t key) except? -1

    @cython.locals(words=uint64_t[::1], rest=uint64_t, following=uint64_t, beside=uint64_t)
    cdef void insert(self, int64_t slot, uint64_t key) noexcept nogil

    @cython.locals(width=int64_t, at=int64_t, k=int64_t)
    cdef void remove(self, int64_t slot) noexcept nogil
