# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

from kvrouter.router.base.common.seqlock cimport Seqlock
from kvrouter.router.index.matching.mirror_table cimport MirrorTable

cdef int64_t TRIES_BEFORE_A_PAUSE, MAX_TRIES, LAYOUT


@cython.final
cdef class SharedTable:
    cdef readonly object memory
    cdef uint64_t[::1] header
    cdef Seqlock lock
    cdef readonly MirrorTable table
    cdef uint64_t layout
    cdef readonly int64_t repeated

    @cython.locals(tries=int64_t)
    cpdef void gather(self, const uint64_t[::1] hashes, const int32_t[::1] row_of_slot, uint16_t[:, ::1] rows) except *

    @cython.locals(version=uint64_t, layout=uint64_t)
    cpdef bint try_gather(
        self, const uint64_t[::1] hashes, const int32_t[::1] row_of_slot, uint16_t[:, ::1] rows
    ) except *
