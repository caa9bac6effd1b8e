# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint16_t


@cython.final
cdef class RuleTables:
    cdef const int64_t[:, ::1] geos, specs, members, exts
    cdef uint16_t[:, ::1] rows
    cdef int64_t lender_row, lender_shift
    cdef int64_t[::1] full_lengths
