# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

from kvrouter.router.base.common.open_addressing cimport OrderedSlots, spread
from kvrouter.router.base.common.seqlock cimport Seqlock
from kvrouter.router.index.matching.holder_rows cimport HolderRows

cdef int64_t TILE_HASHES
cdef uint64_t _LOW16, _LOW32, _END, _ROW, _LINE

cdef int64_t slot_of(uint64_t record) noexcept nogil

@cython.locals(rest=uint64_t)
cdef uint64_t with_link(uint64_t record, uint64_t link) noexcept nogil


@cython.final
cdef class MirrorTable:
    cdef readonly object memory
    cdef readonly Seqlock lock
    cdef readonly OrderedSlots slots
    cdef uint64_t[::1] records
    cdef uint64_t[::1] keys, firsts
    cdef readonly HolderRows rows
    cdef int64_t layouts_shown
    cdef public int64_t[::1] slot_records
    cdef public uint8_t[::1] dead
    cdef uint64_t records_used, free_record
    cdef readonly int64_t entries, records_live

    cpdef void begin(self) noexcept

    cpdef void end(self) except *

    cpdef int64_t record_capacity(self) noexcept

    @cython.locals(i=int64_t)
    cdef uint64_t find(self, uint64_t key) noexcept nogil

    @cython.locals(
        records=uint64_t[::1], mask=uint64_t, fresh=uint64_t, most=int64_t, keys=uint64_t[::1], start=int64_t, end=int64_t,
        h=int64_t, i=int64_t,
        first=uint64_t, holders=int64_t, link=uint64_t, at=uint64_t,
    )
    cpdef void add(self, int64_t slot, int64_t bit, const uint64_t[::1] hashes) except *

    cdef void count(self, int64_t slot) noexcept nogil

    cdef void uncount(self, int64_t slot) noexcept nogil

    @cython.locals(at=uint64_t)
    cdef uint64_t take_record(self) noexcept nogil

    cdef void give_back(self, uint64_t at) noexcept nogil

    @cython.locals(row=int64_t, record=uint64_t, link=uint64_t)
    cdef bint list_to_row(self, int64_t index) noexcept nogil

    @cython.locals(row=int64_t, record=uint64_t, slot=int64_t, bits=uint64_t, link=uint64_t)
    cdef void row_to_list(self, int64_t index) noexcept nogil

    @cython.locals(row=int64_t)
    cdef bint drop_cell(self, int64_t index, int64_t slot, uint64_t bits) noexcept nogil

    @cython.locals(record=uint64_t, link=uint64_t)
    cdef bint drop_first(self, int64_t index) noexcept nogil

    @cython.locals(following=uint64_t)
    cdef void drop_record(self, int64_t index, uint64_t before, uint64_t at) noexcept nogil

    @cython.locals(
        records=uint64_t[::1], mask=uint64_t, keys=uint64_t[::1], start=int64_t, end=int64_t, h=int64_t, i=int64_t,
        record=uint64_t, before=uint64_t,
        at=uint64_t,
    )
    cpdef void discard(self, int64_t slot, int64_t bit, const uint64_t[::1] hashes) except *

    @cython.locals(i=int64_t, word=uint64_t, emptied=bint, d=int64_t)
    cpdef int64_t sweep(self, int64_t start, const int64_t[::1] dead_slots, int64_t budget) noexcept

    @cython.locals(looked=int64_t, before=uint64_t, at=uint64_t, following=uint64_t)
    cdef int64_t sweep_list(self, int64_t index) noexcept nogil

    @cython.locals(
        words=uint64_t[::1], records=uint64_t[::1], keys=uint64_t[::1], firsts=uint64_t[::1], lines=uint64_t, h=int64_t,
        key=uint64_t, i=uint64_t, record=uint64_t, row=int32_t, link=uint64_t, has_rows=bint, slot=int64_t, known=int64_t,
        left=int64_t, most=int64_t,
    )
    cdef void gather(self, const uint64_t[::1] hashes, const int32_t[::1] row_of_slot, uint16_t[:, ::1] rows)

    @cython.locals(
        firsts=uint64_t[::1], cells=uint16_t[:, ::1], slots=int64_t, start=int64_t, end=int64_t, slot=int64_t,
        row=int64_t, h=int64_t,
    )
    cdef void gather_rows(self, int64_t count, const int32_t[::1] row_of_slot, uint16_t[:, ::1] rows)

    @cython.locals(keys=uint64_t[::1], h=int64_t, record=uint64_t, slot=int64_t, link=uint64_t)
    cpdef bint any_resident(self, const uint64_t[::1] hashes, const int32_t[::1] row_of_slot) except *

    @cython.locals(mask=uint64_t, count=int64_t, i=int64_t, record=uint64_t, bits=uint64_t, link=uint64_t)
    cpdef int64_t members(self, int64_t slot, int64_t bit, uint64_t[::1] out) noexcept
