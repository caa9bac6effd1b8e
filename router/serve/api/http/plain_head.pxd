# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint8_t

from kvrouter.router.base.common.head_lines cimport digits, is_name, line_end, value_start

cdef uint8_t _COLON, _LOWER, _A
cdef int64_t HOST, CONTENT_LENGTH, CONTENT_TYPE, ACCEPT, CONNECTION, IGNORED
cdef bytes _IN_HOST, _IN_PATH


@cython.final
cdef class PlainHead:
    cdef readonly str method, path, content_type, accept, authorization
    cdef readonly list headers
    cdef readonly int64_t body_start


@cython.locals(at=int64_t, c=uint8_t)
cdef bint is_host(bytes data, int64_t start, int64_t end)

@cython.locals(at=int64_t)
cdef bint is_path(bytes target)

@cython.locals(
    is_post=bint, target=bytes, at=int64_t, left=int64_t, length=int64_t, seen=int64_t, start=int64_t, end=int64_t,
    colon=int64_t, kind=int64_t, value=int64_t, name=bytes, headers=list
)
cpdef PlainHead plain_head(
    bytes data, dict paths, dict forwarded, tuple below, set hosts, int64_t max_head_bytes, int64_t max_headers
)
