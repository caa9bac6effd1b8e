# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

cdef int64_t NO_ROW, MIN_ROW_HOLDERS, ROW_SHARE, ROW_SLACK, ROW_PADDING, BYTES_PER_CELL


@cython.final
cdef class HolderRows:
    cdef uint16_t[:, ::1] cells
    cdef int64_t[::1] holders
    cdef int64_t used, first_free
    cdef readonly int64_t slots, cells_live, missed, layouts
    cdef object memory

    cpdef int64_t capacity(self) noexcept
    cpdef int64_t room_bytes(self, int64_t rows, int64_t slots) noexcept
    cdef int64_t threshold(self) noexcept nogil

    @cython.locals(few=bint)
    cdef bint too_few(self, int64_t row) noexcept nogil

    @cython.locals(row=int64_t)
    cdef int64_t take(self) noexcept nogil

    cdef void give_back(self, int64_t row) noexcept nogil

    @cython.locals(fresh=bint)
    cdef bint add(self, int64_t row, int64_t slot, uint64_t bits) noexcept nogil

    cdef bint discard(self, int64_t row, int64_t slot, uint64_t bits) noexcept nogil
