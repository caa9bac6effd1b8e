# SPDX-License-Identifier: Apache-2.0
cimport cython

from kvrouter.router.observe.quality.usage_reader cimport UsageReader


@cython.final
cdef class AnswerTap:
    cdef object _send, _clock, _flight, _ids
    cdef bint _streams
    cdef UsageReader _reader
    cdef readonly object first_s
    cdef readonly double last_s, pause_s
    cdef readonly bint was_alone
