# SPDX-License-Identifier: Apache-2.0
"""A sequence lock over two words of memory that processes share; `seqlock.py` documents the class."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from *:
    """
    #include <sched.h>
    #include <stdint.h>
    #include <unistd.h>
    #define kv_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define kv_load(p) __atomic_load_n((p), __ATOMIC_RELAXED)
    #define kv_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
    #define kv_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #define kv_acquire() __atomic_thread_fence(__ATOMIC_ACQUIRE)
    #define kv_release() __atomic_thread_fence(__ATOMIC_RELEASE)
    #if defined(__x86_64__) || defined(__i386__)
    #define kv_relax() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define kv_relax() __asm__ volatile("isb")
    #else
    #define kv_relax()
    #endif
    """
    uint64_t kv_load_acquire(uint64_t *p) noexcept nogil
    uint64_t kv_load(uint64_t *p) noexcept nogil
    void kv_store(uint64_t *p, uint64_t v) noexcept nogil
    void kv_store_release(uint64_t *p, uint64_t v) noexcept nogil
    void kv_acquire() noexcept nogil
    void kv_release() noexcept nogil
    void kv_relax() noexcept nogil
    int sched_yield() noexcept nogil
    int usleep(unsigned int us) noexcept nogil

cdef enum:
    # Pauses of a writer for readers that wait: some 0.1 ms in all. Giving the processor away could take far longer.
    POLITE_PAUSES = 2_000
    # A section lasts microseconds. A reader that has paused this often waits for a writer that does not run.
    SPINS = 200
    PAUSE_US = 50


cdef class Seqlock:
    def __init__(self, words):
        self.words = words
        self.depth = 0

    cpdef void begin(self) noexcept nogil:
        cdef int64_t pauses = 0
        self.depth += 1
        if self.depth > 1:
            return
        if kv_load(&self.words[1]) != 0:
            while kv_load(&self.words[1]) != 0 and pauses < POLITE_PAUSES:
                kv_relax()
                pauses += 1
            kv_store(&self.words[1], 0)
        kv_store(&self.words[0], self.words[0] | 1)
        kv_release()

    cpdef void end(self) noexcept nogil:
        self.depth -= 1
        if self.depth == 0:
            kv_store_release(&self.words[0], self.words[0] + 1)

    cpdef uint64_t version(self) noexcept nogil:
        return kv_load_acquire(&self.words[0])

    cpdef bint is_at(self, uint64_t version) noexcept nogil:
        kv_acquire()
        return kv_load(&self.words[0]) == version

    cpdef void ask_for_a_pause(self) noexcept nogil:
        kv_store(&self.words[1], 1)

    cpdef void pause(self, int64_t tries):
        # The writer may be another thread of this process, which needs the interpreter's lock.
        with nogil:
            if tries < SPINS:
                sched_yield()
            else:
                usleep(PAUSE_US)
