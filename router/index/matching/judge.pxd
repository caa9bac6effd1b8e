# SPDX-License-Identifier: Apache-2.0
cimport cython
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

from kvrouter.router.model.kvcache.gpu_hit cimport gpu_hit, single_group_hit
from kvrouter.router.model.kvcache.offload_hit cimport tier_hit
from kvrouter.router.model.kvcache.rule_tables cimport RuleTables
from kvrouter.router.index.matching.mirror_table cimport MirrorTable

cdef int64_t FOUND_GPU, FOUND_CPU, FOUND_DISK, FOUND_LIMITER, FOUND_FULL, FOUND_COLUMNS
cdef int64_t GEO_EXT_START, GEO_LENT, GEO_SPEC_END, GEO_SPEC_START, RULE_FULL, SPEC_RULE
cdef int64_t MAX_SOURCES, PULL_COLUMNS, PULL_SOURCE, PULL_TOKENS, PULL_WORKER


@cython.final
cdef class Judge:
    cdef RuleTables tables
    cdef const int64_t[::1] bases
    cdef const int32_t[::1] row_of_slot
    cdef int64_t row_count
    cdef const int64_t[::1] members, starts
    cdef int64_t[::1] sources, reaches

    cpdef bint any_resident(self, MirrorTable mirror, const uint64_t[::1] hashes) noexcept

    @cython.locals(
        w=int64_t, row=int64_t, gpu=int64_t, limiter=int64_t, cpu=int64_t, disk=int64_t, covered=int64_t, s=int64_t, t=int64_t,
        found=int64_t[:, ::1],
    )
    cpdef object judge(self, MirrorTable mirror, const uint64_t[::1] hashes, int64_t num_tokens)

    @cython.locals(
        found=int64_t[:, ::1], rows=int64_t[:, ::1], count=int64_t, c=int64_t, sources=int64_t, m=int64_t, w=int64_t,
        own=int64_t, is_empty=bint, first=int64_t, i=int64_t, s=int64_t, tokens=int64_t, at=int64_t, column=int64_t,
    )
    cpdef object pulls(self, object hits, int64_t num_tokens, int64_t turn)

    @cython.locals(count=int64_t, i=int64_t, w=int64_t, lent=int64_t, reach=int64_t, at=int64_t)
    cdef int64_t choose_sources(
        self, int64_t[:, ::1] found, int64_t first, int64_t last, int64_t num_tokens, int64_t turn
    ) noexcept

    @cython.locals(end=int64_t, bits=uint16_t, row=int64_t, i=int64_t)
    cdef bint holds_nothing(self, int64_t w) noexcept

    @cython.locals(hit=int64_t)
    cdef int64_t hit_with(self, int64_t w, int64_t source, int64_t gpu, int64_t num_tokens) noexcept

    cpdef object place_bits(self, int64_t worker, int64_t banks)

    cpdef int64_t spec_start(self, int64_t worker) noexcept

    cpdef int64_t cover(self, int64_t worker, int64_t spec, int64_t num_tokens) noexcept
