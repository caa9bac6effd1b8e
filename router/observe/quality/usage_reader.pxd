# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t

cdef bytes EVENT, ERROR_EVENT, COMMENT
cdef int64_t MAX_ERROR_BYTES, TAIL_BYTES
cdef int _LINE_END


@cython.final
cdef class UsageReader:
    cdef bint _streams, _in_comment
    cdef bytes _key
    cdef int64_t _begun
    cdef bytearray _error
    # A test reads how much is kept.
    cdef readonly bytes _tail
    cdef readonly bytearray _value
    cdef readonly object _candidates

    @cython.locals(
        tail=bytes, window=bytes, name=bytes, fresh=int64_t, size=int64_t, key=int64_t, end=int64_t, events=int64_t,
        error=int64_t
    )
    cpdef int64_t feed(self, list parts) except -1

    @cython.locals(start=int64_t)
    cdef bint _is_comment(self, bytes window, int64_t at) except -1

    @cython.locals(value=bytearray, room=int64_t)
    cdef _keep(self, bytes window, int64_t start, int64_t end)
