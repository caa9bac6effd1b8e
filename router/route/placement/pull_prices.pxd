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
    cdef double _latency_s
    cdef dict _hosts
    cdef dict _known
    cdef list _last_sources
    cdef list _last_lenders
    cdef public double prefill_tokens
    cdef public double transfer_tokens
    cdef public double token_cost

    @cython.locals(
        sources=list, lenders=list, place=cython.Py_ssize_t, is_same=cython.bint, lender=tuple, transfer_rate=tuple, rates=dict,
        rate=double, latency=double, tokens=int64_t, fetched=int64_t, waiting=int64_t, least=double, token_s=double, missing=double,
        transfer=double, price=double, best_transfer=double, best_cost=double,
    )
    cpdef object cheapest(
        self, tuple pulls, object worker, int64_t reached, double computing, double loading, double slowness
    )

    @cython.locals(known=dict, sources=list)
    cdef object _lender(self, object source, Py_ssize_t place)
