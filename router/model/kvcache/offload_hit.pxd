# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from kvrouter.router.model.kvcache.gpu_hit cimport coordinator_hit, resident
from kvrouter.router.model.kvcache.rule_tables cimport RuleTables

cdef int64_t EXT_CHUNK, EXT_CPU_BANK, EXT_CPU_MASK, EXT_EAGLE, EXT_LENT_STORAGE_MASK, EXT_SPARSE, EXT_STORAGE_BANK, EXT_STORAGE_MASK
cdef int64_t EXT_WINDOW, EXT_WINDOW_CHUNKS
cdef int64_t GEO_CPU_END, GEO_CPU_START, GEO_EXT_END, GEO_EXT_MAMBA_ALIGN, GEO_EXT_SPARSE, GEO_EXT_START
cdef int64_t GEO_EXT_TAIL_BLOCK, GEO_EXT_UNPROVEN, GEO_HASH_BLOCK, GEO_SCHEDULER_BLOCK, GEO_STORAGE_END
cdef int64_t GEO_STORAGE_START, GEO_SUFFIX_ALIGN, RULE_CHUNKED_LOCAL, SPEC_CHUNK, SPEC_RULE
cdef int64_t GEO_ALIGN, GEO_JOINT_END, GEO_JOINT_START, GEO_SPEC_START, LOAD_BACK_TOKENS, RULE_FULL, RULE_SLIDING_WINDOW
cdef int64_t SPEC_BLOCK, SPEC_MEMBER_END, SPEC_MEMBER_START, SPEC_WINDOW
cdef uint64_t _FLAG
cdef int64_t _STRETCH

@cython.locals(lender=int64_t, y=int64_t)
cdef bint offloaded(RuleTables tables, int64_t row, int64_t index, int64_t x, bint storage) noexcept nogil

@cython.locals(
    cpu=int64_t, cpu_mask=uint16_t, disk=int64_t, disk_mask=uint16_t, lent=int64_t, lent_mask=uint16_t, y=int64_t,
    lent_disk=int64_t, lent_disk_mask=uint16_t, missing=uint16_t, i=int64_t, held=uint16_t,
)
cdef bint all_offloaded(
    RuleTables tables, int64_t row, int64_t x, bint storage, int64_t first, int64_t last
) noexcept nogil

@cython.locals(chunk=int64_t)
cdef int64_t offload_prefix(
    RuleTables tables, int64_t row, int64_t x, bint storage, int64_t scale, int64_t first, int64_t last
) noexcept nogil

@cython.locals(run=int64_t, need=int64_t, chunk=int64_t)
cdef int64_t offload_window(
    RuleTables tables, int64_t row, int64_t x, bint storage, int64_t scale, int64_t first, int64_t last,
    int64_t window, int64_t initial,
) noexcept nogil

@cython.locals(
    first=int64_t, last=int64_t, num_hashes=int64_t, limit=int64_t, sparse_first=int64_t, hit=int64_t,
    verified=uint64_t, begin=int64_t, again=bint, seen_sparse=bint, next_begin=int64_t, x=int64_t, chunk=int64_t,
    scale=int64_t, chunks=int64_t, unverified=bint, query=int64_t, end=int64_t, start=int64_t, found=int64_t,
    window=int64_t, extra=int64_t, initial=int64_t, candidate=int64_t, padding=int64_t, new=int64_t,
)
cdef int64_t complete_chunks(
    RuleTables tables, int64_t row, int64_t w, int64_t num_tokens, int64_t local, bint storage
) noexcept nogil

@cython.locals(divisor=int64_t, g=int64_t, scale=int64_t, chunk=int64_t, a=int64_t, b=int64_t)
cdef bint single_block_chunks(RuleTables tables, int64_t row, int64_t w, int64_t num_tokens) noexcept nogil

@cython.locals(
    found=int64_t, block=int64_t, hash_block=int64_t, complete=int64_t, boundary=int64_t, everywhere=bint, g=int64_t
)
cdef int64_t chunks_hit(
    RuleTables tables, int64_t row, int64_t w, int64_t num_tokens, int64_t local, bint storage
) noexcept nogil

@cython.locals(s=int64_t, shift=int64_t, align=int64_t, found=int64_t, _=int64_t)
cdef int64_t suffix_hit(
    RuleTables tables, int64_t row, int64_t w, int64_t first, int64_t last, int64_t num_tokens, int64_t local
) noexcept nogil

@cython.locals(
    first=int64_t, count=int64_t, missing=int64_t, s=int64_t, block=int64_t, scale=int64_t, start=int64_t, end=int64_t,
    last=int64_t, begin=int64_t, i=int64_t,
)
cdef bint loads_back(RuleTables tables, int64_t row, int64_t w, int64_t hit) noexcept nogil

@cython.locals(first=int64_t, last=int64_t, hit=int64_t, _=int64_t)
cdef int64_t joint_hit(RuleTables tables, int64_t row, int64_t w, int64_t num_tokens, int64_t gpu) noexcept nogil

@cython.locals(tail=int64_t, local=int64_t, found=int64_t, first=int64_t, last=int64_t)
cpdef int64_t tier_hit(
    RuleTables tables, int64_t row, int64_t w, int64_t num_tokens, int64_t gpu, bint storage
) noexcept nogil
