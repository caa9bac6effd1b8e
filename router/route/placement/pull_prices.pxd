# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


cdef class PullPrices:
    cdef object _lenders
    cdef object _failed
    cdef int64_t _num_tokens
    cdef bint _idle
    cdef double _cpu_cost
    cdef double _prefill_rate
    cdef dict _known

    @cython.locals(
        known=dict, rate=double, latency=double, by_tier=tuple, reached=int64_t, fetched=int64_t,
        least=double, lent=int64_t, rates=dict, token_s=double, missing_share=double, transfer=double, price=double,
        token_cost=double,
    )
    cpdef object cheapest(self, object hit, double computing, double loading, double slowness)
