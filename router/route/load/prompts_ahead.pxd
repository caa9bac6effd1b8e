# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class PromptAhead:
    cdef readonly object prefixes, units, key
    cdef list _names
    cdef const int64_t[:] _compared
    cdef readonly int64_t num_tokens, unit_tokens, step_tokens
    cdef public int64_t new_tokens
    cdef public tuple checkpoints
    cdef public double ends_s
    cdef public object worker

    @cython.locals(depth=int64_t, known_tokens=int64_t, stop=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cpdef int64_t common_tokens(self, PromptAhead other) except -1


@cython.locals(low=cython.Py_ssize_t, high=cython.Py_ssize_t, middle=cython.Py_ssize_t)
cdef Py_ssize_t _common_names(list names, list other_names) except -1


@cython.final
cdef class PromptsAhead:
    cdef Py_ssize_t _max_prompts, _max_units, _units
    cdef dict _prompts, _siblings

    cpdef object add(self, object worker, PromptAhead prompt, double ends_s)

    @cython.locals(prompt=PromptAhead)
    cpdef object drop(self, object prefixes)

    @cython.locals(
        siblings=dict, sibling=PromptAhead, resumable=int64_t, computed=int64_t, max_tokens=int64_t, align_tokens=int64_t,
        common=int64_t, looked_at=cython.Py_ssize_t, expired=list,
    )
    cpdef object coming(self, object worker, PromptAhead prompt, object rule, double now)


cdef Py_ssize_t _size(PromptAhead prompt) except -1
