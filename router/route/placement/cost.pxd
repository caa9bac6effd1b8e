# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t

from kvrouter.router.route.placement.copies cimport Copies
from kvrouter.router.route.placement.pull_prices cimport PullPrices

@cython.locals(
    i=cython.Py_ssize_t, t=cython.Py_ssize_t, deepest=cython.Py_ssize_t, by_tier=tuple, token_costs=tuple, prices=PullPrices, copies=Copies,
    num_tokens=int64_t, shared=int64_t, on_gpu=int64_t, reached=int64_t, coming=int64_t, loading=double, delay_share=double, mean_pressure=double, shared_copy=double, relief=double, usual_queued=double,
    decode=double, prefill=double, new=double, slowness=double, work=double, queued=double, copy=double, lasting=double,
    saved=double, delay=double, room=double, junction=double, bonus=double,
)
cpdef object weigh(object hits, object context, int64_t longest, bint idle=*)

@cython.locals(i=cython.Py_ssize_t, limit=int64_t, queued=double, decode=double)
cpdef tuple _queues(object hits, object context, object loads, object corrections)

@cython.locals(queued=double, decode=double, deepest=cython.Py_ssize_t)
cpdef double _shortest_queue(object hits, list queues, object context, int64_t beyond) except -1

cpdef double _fetched_saving(
    double saved, int64_t fetched, double token_cost, Copies copies, int64_t reached, int64_t shared, double slowness
) except? -1
