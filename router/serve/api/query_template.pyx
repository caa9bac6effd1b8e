# SPDX-License-Identifier: Apache-2.0
"""The compiled version of `query_template.py`, which documents the interface."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    # No 64-bit number has more digits.
    MAX_DIGITS = 20


cdef class QueryTemplate:
    cdef bytes text
    # Two entries for each number: the end of the piece before it, and its index in the table.
    cdef Py_ssize_t *at
    cdef Py_ssize_t numbers, rows, columns

    def __cinit__(self, list pieces not None, list cells not None, Py_ssize_t columns):
        cdef Py_ssize_t i, end = 0
        self.numbers = len(cells)
        self.columns = columns
        if len(pieces) != self.numbers + 1 or columns < 1:
            raise ValueError(f"{len(pieces)} pieces for {self.numbers} numbers of {columns} columns")
        self.at = <Py_ssize_t *>PyMem_Malloc((2 * self.numbers + 1) * sizeof(Py_ssize_t))
        if self.at == NULL:
            raise MemoryError
        for i in range(self.numbers):
            end += len(pieces[i])
            self.at[2 * i] = end
            self.at[2 * i + 1] = cells[i]
            if self.at[2 * i + 1] < 0:
                raise ValueError(f"cell {cells[i]}")
            self.rows = max(self.rows, self.at[2 * i + 1] // columns + 1)
        self.text = b"".join(pieces)

    def __dealloc__(self):
        PyMem_Free(self.at)

    def fill(self, const int64_t[:, ::1] found not None):
        cdef Py_ssize_t i, start = 0, end
        cdef uint64_t number
        cdef const char *text = PyBytes_AS_STRING(self.text)
        cdef char digits[MAX_DIGITS]
        cdef char *first
        cdef const int64_t *table
        cdef bytes reply
        cdef char *out
        cdef char *begin
        if found.shape[1] != self.columns or found.shape[0] < self.rows:
            raise ValueError(f"a table of {found.shape[0]} rows of {found.shape[1]}")
        begin = <char *>PyMem_Malloc(len(self.text) + MAX_DIGITS * self.numbers + 1)
        if begin == NULL:
            raise MemoryError
        table = &found[0, 0] if self.numbers else NULL
        out = begin
        for i in range(self.numbers):
            end = self.at[2 * i]
            memcpy(out, text + start, end - start)
            out += end - start
            start = end
            number = <uint64_t>table[self.at[2 * i + 1]]
            first = digits + MAX_DIGITS
            while True:
                first -= 1
                first[0] = <char>(48 + number % 10)
                number //= 10
                if number == 0:
                    break
            end = digits + MAX_DIGITS - first
            memcpy(out, first, end)
            out += end
        end = len(self.text)
        memcpy(out, text + start, end - start)
        out += end - start
        try:
            return PyBytes_FromStringAndSize(begin, out - begin)
        finally:
            PyMem_Free(begin)
