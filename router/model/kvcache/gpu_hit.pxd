# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint64_t

from kvrouter.router.model.kvcache.rule_tables cimport RuleTables

cdef int64_t GEO_ALIGN, GEO_HASH_BLOCK, GEO_SIMPLE, GEO_SPEC_END, GEO_SPEC_START, GEO_UNCACHED, GEO_UNITARY
cdef int64_t MEMBER_BANK, MEMBER_MASK
cdef int64_t RULE_CHUNKED_LOCAL, RULE_FULL, RULE_MAMBA, RULE_SLIDING_WINDOW
cdef int64_t SPEC_BLOCK, SPEC_CHUNK, SPEC_EAGLE, SPEC_MEMBER_END, SPEC_MEMBER_START, SPEC_RULE, SPEC_WINDOW
cdef int64_t _STRETCH
cdef uint64_t _FLAG

@cython.locals(m=int64_t)
cpdef bint resident(RuleTables tables, int64_t row, int64_t index, int64_t start, int64_t end) noexcept nogil

@cython.locals(run=int64_t, m=int64_t, line=int64_t, mask=int64_t, block=int64_t, common=int64_t, i=int64_t)
cdef int64_t run_from_zero(
    RuleTables tables, int64_t row, int64_t shift, int64_t start, int64_t end, int64_t scale, int64_t limit
) noexcept nogil

@cython.locals(
    block=int64_t, scale=int64_t, start=int64_t, end=int64_t, run=int64_t, hit=int64_t, inner=int64_t, first=int64_t,
    last=int64_t, index=int64_t,
)
cdef int64_t floor_full(
    RuleTables tables, int64_t row, int64_t shift, int64_t s, int64_t hash_block, int64_t num_hashes,
    int64_t max_length, bint drop, int64_t align,
) noexcept nogil

@cython.locals(
    block=int64_t, scale=int64_t, start=int64_t, end=int64_t, need=int64_t, run=int64_t, blocks=int64_t, i=int64_t,
    boundary=int64_t,
)
cdef int64_t floor_sliding_window(
    RuleTables tables, int64_t row, int64_t shift, int64_t s, int64_t hash_block, int64_t num_hashes,
    int64_t max_length, bint drop, int64_t align,
) noexcept nogil

@cython.locals(block=int64_t, scale=int64_t, start=int64_t, end=int64_t, run=int64_t)
cdef int64_t floor_chunked_local(
    RuleTables tables, int64_t row, int64_t shift, int64_t s, int64_t hash_block, int64_t num_hashes,
    int64_t max_length, bint drop, int64_t align,
) noexcept nogil

@cython.locals(block=int64_t, start=int64_t, end=int64_t, index=int64_t, scale=int64_t, i=int64_t)
cdef int64_t floor_mamba(
    RuleTables tables, int64_t row, int64_t shift, int64_t s, int64_t hash_block, int64_t num_hashes,
    int64_t max_length, bint drop, int64_t align,
) noexcept nogil

cdef int64_t floor_of(
    RuleTables tables, int64_t row, int64_t shift, int64_t s, int64_t hash_block, int64_t num_hashes,
    int64_t max_length, bint drop, int64_t align,
) noexcept nogil

@cython.locals(block=int64_t)
cdef int64_t eagle_margin(RuleTables tables, int64_t s, int64_t align) noexcept nogil

@cython.locals(
    hash_block=int64_t, num_hashes=int64_t, hit=int64_t, best=int64_t, limiter=int64_t, block=int64_t, drop=bint,
    verified=uint64_t, s=int64_t, current=int64_t, full=bint, length=int64_t, new=int64_t,
)
cpdef (int64_t, int64_t) coordinator_hit(
    RuleTables tables, int64_t row, int64_t shift, int64_t w, int64_t first, int64_t last, int64_t align,
    int64_t num_tokens,
) noexcept nogil

@cython.locals(first=int64_t, last=int64_t)
cpdef (int64_t, int64_t) gpu_hit(RuleTables tables, int64_t row, int64_t w, int64_t num_tokens) noexcept nogil

@cython.locals(hash_block=int64_t, num_hashes=int64_t, length=int64_t, drop=bint, align=int64_t)
cpdef int64_t single_group_hit(
    RuleTables tables, int64_t row, int64_t w, int64_t num_tokens, int64_t s
) noexcept nogil
