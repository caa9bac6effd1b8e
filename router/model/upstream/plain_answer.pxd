# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint8_t

from kvrouter.router.base.common.head_lines cimport digits, is_name, line_end, value_start

cdef uint8_t _CR, _LF, _SPACE
cdef int64_t REASON_AT, CHUNKED, MAX_CHUNK_DIGITS, LENGTH, TRANSFER, CONNECTION, JUDGED
cdef bytes _HEX


@cython.final
cdef class PlainAnswer:
    cdef readonly bytes reason
    cdef readonly list headers
    cdef readonly int64_t status, length, body_start


@cython.locals(
    end=int64_t, status=int64_t, length=int64_t, start=int64_t, colon=int64_t, value=int64_t, kind=int64_t,
    name=bytes, content=bytes
)
cpdef PlainAnswer plain_answer(bytes data, int64_t max_head_bytes)

@cython.locals(size=int64_t, at=int64_t, length=int64_t)
cpdef int64_t whole_chunks(bytes data, int64_t start, list parts) except -2
