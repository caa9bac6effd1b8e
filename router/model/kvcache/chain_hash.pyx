# SPDX-License-Identifier: Apache-2.0
"""Chains of block hashes without a Python object per block; `chain_hash.py` documents the functions."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "sha256.h":
    enum: SHA256_DIGEST
    ctypedef void (*sha256_compress)(uint32_t *state, const uint8_t *data, size_t chunks) noexcept
    void sha256_compress_plain(uint32_t *state, const uint8_t *data, size_t chunks) noexcept
    sha256_compress sha256_fastest() noexcept
    void sha256(sha256_compress compress, const uint8_t *data, size_t size, uint8_t *digest) noexcept

cdef extern from "block_bytes.h":
    enum: MAX_PARENT_BYTES, MAX_FRAME_BYTES, MAX_ID_BYTES, MAX_OTHER_BYTES
    uint64_t get_big(const uint8_t *p) noexcept
    uint8_t *put_block_pickled(
        uint8_t *start, const uint8_t *parent, size_t parent_bytes, const int64_t *ids, size_t count,
        const uint8_t *ending, size_t ending_bytes,
    ) noexcept
    uint8_t *put_block_cbor(
        uint8_t *start, const uint8_t *parent, size_t parent_bytes, const int64_t *ids, size_t count,
        const uint8_t *ending, size_t ending_bytes,
    ) noexcept
    uint8_t *put_page(uint8_t *start, const int64_t *ids, size_t count, int bigrams) noexcept

cdef sha256_compress _fastest = sha256_fastest()


def hash_blocks(
    bytes parent not None, const int64_t[::1] token_ids not None, Py_ssize_t block_size, tuple endings not None,
    bint cbor, digest, uint64_t[::1] hashes not None,
):
    cdef Py_ssize_t blocks = hashes.shape[0], longest = 0, size, i
    cdef bytes tail = parent, ending
    cdef const uint8_t *parent_at = <const uint8_t *>PyBytes_AS_STRING(parent)
    cdef Py_ssize_t parent_bytes = len(parent)
    cdef uint8_t sha_digest[SHA256_DIGEST]
    cdef uint8_t *buffer
    cdef uint8_t *end
    cdef int64_t signs = 0
    if block_size < 1 or not endings or blocks > token_ids.shape[0] // block_size:
        raise ValueError(f"{blocks} blocks of {block_size} ids: {token_ids.shape[0]} ids, {len(endings)} endings")
    if blocks == 0:
        return parent
    for ending in endings:
        longest = max(longest, len(ending))
    for i in range(blocks * block_size):
        signs |= token_ids[i]
    size = MAX_OTHER_BYTES + MAX_PARENT_BYTES + MAX_ID_BYTES * block_size + longest
    if signs < 0 or parent_bytes > MAX_PARENT_BYTES or (size > MAX_FRAME_BYTES and not cbor):
        return None
    buffer = <uint8_t *>PyMem_Malloc(size)
    if buffer == NULL:
        raise MemoryError
    try:
        for i in range(blocks):
            ending = endings[min(i, len(endings) - 1)]
            end = (put_block_cbor if cbor else put_block_pickled)(
                buffer, parent_at, parent_bytes, &token_ids[i * block_size], block_size,
                <const uint8_t *>PyBytes_AS_STRING(ending), len(ending),
            )
            if digest is None:
                sha256(_fastest, buffer, end - buffer, sha_digest)
                parent_at, parent_bytes = sha_digest, SHA256_DIGEST
            else:
                tail = digest(PyBytes_FromStringAndSize(<char *>buffer, end - buffer))
                parent_bytes = len(tail)
                parent_at = <const uint8_t *>PyBytes_AS_STRING(tail)
                if not 8 <= parent_bytes <= MAX_PARENT_BYTES:
                    raise ValueError(f"a digest of {parent_bytes} bytes")
            hashes[i] = get_big(parent_at + parent_bytes - 8)
        return PyBytes_FromStringAndSize(<const char *>parent_at, parent_bytes)
    finally:
        PyMem_Free(buffer)


def hash_pages(
    bytes parent not None, const int64_t[::1] token_ids not None, Py_ssize_t page_size, bint bigrams,
    bytes namespace not None, uint64_t[::1] hashes not None,
):
    cdef Py_ssize_t pages = hashes.shape[0], lookahead = 1 if bigrams else 0, parent_bytes = len(parent), i
    cdef Py_ssize_t namespace_bytes = len(namespace)
    cdef uint8_t digest[SHA256_DIGEST]
    cdef uint8_t named[2 * SHA256_DIGEST]
    cdef uint8_t *buffer
    cdef uint8_t *start
    cdef uint8_t *end
    cdef int64_t bits = 0
    if page_size < 1 or pages > max(0, token_ids.shape[0] - lookahead) // page_size:
        raise ValueError(f"{pages} pages of {page_size} ids: {token_ids.shape[0]} ids")
    if parent_bytes not in (0, SHA256_DIGEST) or namespace_bytes not in (0, SHA256_DIGEST):
        raise ValueError(f"a parent of {parent_bytes} bytes and a namespace of {namespace_bytes}")
    if pages == 0:
        return parent
    for i in range(pages * page_size + lookahead):
        bits |= token_ids[i]
    if bits < 0 or bits >> 32:
        return None
    buffer = <uint8_t *>PyMem_Malloc(SHA256_DIGEST + 8 * page_size)
    if buffer == NULL:
        raise MemoryError
    try:
        memcpy(buffer, PyBytes_AS_STRING(parent), parent_bytes)
        memcpy(named, PyBytes_AS_STRING(namespace), namespace_bytes)
        start = buffer + parent_bytes
        for i in range(pages):
            end = put_page(start, &token_ids[i * page_size], page_size, bigrams)
            sha256(_fastest, buffer, end - buffer, digest)
            memcpy(buffer, digest, SHA256_DIGEST)
            start = buffer + SHA256_DIGEST
            if namespace_bytes:
                memcpy(named + SHA256_DIGEST, digest, 8)
                sha256(_fastest, named, SHA256_DIGEST + 8, digest)
            hashes[i] = get_big(digest)
        return PyBytes_FromStringAndSize(<const char *>buffer, SHA256_DIGEST)
    finally:
        PyMem_Free(buffer)


def hash_sha256(bytes data not None, bint plain):
    cdef uint8_t digest[SHA256_DIGEST]
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(data)
    sha256(sha256_compress_plain if plain else _fastest, at, len(data), digest)
    return PyBytes_FromStringAndSize(<char *>digest, SHA256_DIGEST)
