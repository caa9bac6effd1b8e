# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t


# A chat may have thousands of nodes one behind the other, which are freed together.
@cython.final
@cython.trashcan(True)
cdef class PrefixNode:
    cdef public PrefixNode parent
    cdef public list names
    cdef public Py_ssize_t end, count
    cdef public tuple ends_s
    cdef public object tail


@cython.final
cdef class PromptPrefixes:
    cdef readonly object prompts
    cdef readonly int64_t step_tokens
    cdef public list nodes


cdef class PrefixTree:
    cdef Py_ssize_t _max_names, _max_nodes, _size
    cdef readonly dict _node_of
    cdef readonly object _nodes

    @cython.locals(end=cython.Py_ssize_t, node=PrefixNode)
    cpdef list find(self, list names)

    @cython.locals(ends_s=double, expiries=dict, node=PrefixNode)
    cpdef object sent(self, PromptPrefixes prefixes, object worker, double now, double ttl_s, int kind=*)

    @cython.locals(path=list, shared=PrefixNode, node=PrefixNode, continues=cython.bint)
    cpdef object count(self, PromptPrefixes prefixes, object tail_of)

    @cython.locals(place=cython.Py_ssize_t, low=cython.Py_ssize_t, high=cython.Py_ssize_t, middle=cython.Py_ssize_t, node=PrefixNode)
    cdef tuple _deepest(self, list names)

    @cython.locals(known=cython.Py_ssize_t, node=PrefixNode, used=PrefixNode)
    cdef PrefixNode _keep(self, list names)

    @cython.locals(length=cython.Py_ssize_t, front=PrefixNode)
    cdef PrefixNode _split(self, PrefixNode node, Py_ssize_t end)

    cdef PrefixNode _add(self, PrefixNode node)

    cdef object _drop(self, PrefixNode node)


@cython.locals(expiries=dict, node=PrefixNode)
cpdef object settle(PromptPrefixes prefixes, object worker, double ends_s, int kind=*)

@cython.locals(tokens=dict, expiries=dict, node=PrefixNode)
cpdef dict tokens_at(list path, int64_t step_tokens, int64_t num_tokens, double now, int kind=*)

@cython.locals(counts=list, start=cython.Py_ssize_t, node=PrefixNode)
cpdef list counts_of(list path)

@cython.locals(path=list, last=PrefixNode, node=PrefixNode)
cdef list _nodes_of(PromptPrefixes prefixes)

cdef object _forget(dict expiries, double now)
