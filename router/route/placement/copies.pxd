# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class Copies:
    cdef readonly list saved_tokens
    cdef readonly int64_t piece_tokens, depth_tokens

    @cython.locals(piece=int64_t, rest=int64_t, last=int64_t, before=double)
    cpdef double of(self, int64_t hit_tokens) except? -1


@cython.locals(saved_tokens=list, wanted=double)
cpdef Copies copies_of(list counts, int64_t piece_tokens, int64_t workers)
