# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

from kvrouter.router.common.open_addressing cimport close_gap, home, homes
from kvrouter.router.matching.holder_rows cimport HolderRows

cdef int64_t EMPTY, FIRST_ROW, TILE_HASHES
cdef uint64_t _LOW16, _LOW32, _HIGH32, _END

@cython.locals(link=uint64_t)
cdef int64_t record_next(uint64_t record) noexcept nogil

cdef int64_t record_slot(uint64_t record) noexcept nogil

@cython.locals(rest=uint64_t, link=uint64_t)
cdef uint64_t link_to(uint64_t record, int64_t following) noexcept nogil


@cython.final
cdef class MirrorTable:
    cdef uint64_t[::1] keys
    cdef int32_t[::1] heads
    cdef uint64_t[::1] records
    cdef int64_t[::1] firsts
    cdef readonly HolderRows rows
    cdef public int64_t[::1] slot_records
    cdef public uint8_t[::1] dead
    cdef int64_t records_used, free_head
    cdef readonly int64_t keys_used, records_live

    cpdef int64_t key_capacity(self) noexcept
    cpdef int64_t record_capacity(self) noexcept
    cpdef int64_t entries(self) noexcept

    @cython.locals(capacity=int64_t, i=int64_t, j=int64_t)
    cdef void take_over(self, uint64_t[::1] old_keys, int32_t[::1] old_heads) noexcept nogil

    @cython.locals(capacity=int64_t)
    cdef int64_t probe(self, uint64_t key, int64_t i) noexcept nogil

    cdef int64_t find(self, uint64_t key) noexcept nogil

    @cython.locals(
        heads=int32_t[::1], records=uint64_t[::1], capacity=int64_t, mask=uint64_t, fresh=uint64_t, h=int64_t, key=uint64_t, i=int64_t, first=int64_t, at=int64_t,
        most=int64_t, holders=int64_t,
    )
    cpdef void add(self, int64_t slot, int64_t bit, const uint64_t[::1] hashes) noexcept

    @cython.locals(at=int64_t)
    cdef int64_t take_record(self) noexcept nogil

    cdef void free_record(self, int64_t at) noexcept nogil

    @cython.locals(row=int64_t, at=int64_t, record=uint64_t, following=int64_t)
    cdef bint list_to_row(self, int64_t index) noexcept nogil

    @cython.locals(row=int64_t, first=int64_t, slot=int64_t, bits=uint64_t, at=int64_t)
    cdef void row_to_list(self, int64_t index) noexcept nogil

    @cython.locals(row=int64_t)
    cdef bint drop_cell(self, int64_t index, int64_t slot, uint64_t bits) noexcept nogil

    @cython.locals(record=uint64_t, following=int64_t)
    cdef bint drop_record(self, int64_t index, int64_t before, int64_t at) noexcept nogil

    cdef void drop_entry(self, int64_t index) noexcept nogil

    @cython.locals(
        records=uint64_t[::1], capacity=int64_t, mask=uint64_t, h=int64_t, i=int64_t, before=int64_t, at=int64_t
    )
    cpdef void discard(self, int64_t slot, int64_t bit, const uint64_t[::1] hashes) noexcept

    @cython.locals(
        i=int64_t, capacity=int64_t, head=int64_t, before=int64_t, at=int64_t, emptied=bint, d=int64_t, following=int64_t
    )
    cpdef int64_t sweep(self, int64_t start, const int64_t[::1] dead_slots, int64_t budget) noexcept

    @cython.locals(
        records=uint64_t[::1], firsts=int64_t[::1], h=int64_t, link=uint64_t, record=uint64_t, row=int32_t, has_rows=bint,
    )
    cdef void gather(self, const uint64_t[::1] hashes, const int32_t[::1] row_of_slot, uint16_t[:, ::1] rows)

    @cython.locals(
        firsts=int64_t[::1], cells=uint16_t[:, ::1], slots=int64_t, start=int64_t, end=int64_t, slot=int64_t, row=int64_t,
        h=int64_t,
    )
    cdef void gather_rows(self, int64_t count, const int32_t[::1] row_of_slot, uint16_t[:, ::1] rows)

    @cython.locals(h=int64_t, at=int64_t, slot=int64_t)
    cpdef bint any_resident(self, const uint64_t[::1] hashes, const int32_t[::1] row_of_slot) noexcept

    @cython.locals(mask=uint64_t, count=int64_t, i=int64_t, at=int64_t, bits=uint64_t, record=uint64_t)
    cpdef int64_t members(self, int64_t slot, int64_t bit, uint64_t[::1] out) noexcept
