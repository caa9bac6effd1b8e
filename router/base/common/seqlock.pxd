# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint64_t


@cython.final
cdef class Seqlock:
    cdef uint64_t[::1] words
    cdef readonly int64_t depth

    cpdef void begin(self) noexcept nogil
    cpdef void end(self) noexcept nogil
    cpdef uint64_t version(self) noexcept nogil
    cpdef bint is_at(self, uint64_t version) noexcept nogil
    cpdef void ask_for_a_pause(self) noexcept nogil
    cpdef void pause(self, int64_t tries)
