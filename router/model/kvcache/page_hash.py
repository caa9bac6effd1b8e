# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hashes, recomputed: SHA-256 of the previous page's whole digest and the token ids, 4 bytes each.

The wire carries the first 8 bytes of a digest. A cache salt takes the place of the first page's parent. The LoRA's
namespace is not in the chain: each hash of it is hashed once more. With EAGLE a page is one of pairs of successive
tokens, so it covers one token more than it has.
Source: SGLang 0.5.23 srt/mem_cache/utils.py:116, events.py:190, disaggregation/kv_events.py:312,
cpp_utils/hash_binding.cpp.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.kvcache.chain_hash import hash_pages

# Of each algorithm: the tokens after a page that its hash covers too.
LOOKAHEAD_TOKENS = {"sglang": 0, "sglang_bigram": 1}

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"

# Before the ids of a page that has to be written at 8 bytes each: an odd length is no other page's.
_WIDE_TAG = b"\xff"

# Ids of a page are written at this width, unless one does not fit.
ID_BYTES = 4


def salt_seed(cache_salt: str) -> bytes:
    """What stands for the parent of the first page of prompts with this salt."""
    return hashlib.sha256(_SALT_TAG + cache_salt.encode("utf-8", "surrogatepass")).digest()


def namespace_seed(extra_key: str) -> bytes:
    """extra_key: the engine's own name of the prompts of one LoRA; it ends in the id that the engine gave it."""
    encoded = extra_key.encode("utf-8", "surrogatepass")
    part = b"\x01" + len(encoded).to_bytes(8, "little") + encoded
    return hashlib.sha256(_NAMESPACE_TAG + part + b"\x00").digest()


def page_bytes(tokens: Sequence[int], bigrams: bool) -> bytes:
    """What of one page is hashed after its parent. tokens: one more than the page has where it is one of pairs."""
    ids = np.asarray(tokens, np.uint64)
    units = np.stack((ids[:-1], ids[1:]), 1).ravel() if bigrams else ids
    wide = bool(ids.size) and int(ids.max()) >= 1 << 8 * ID_BYTES
    if wide:
        return _WIDE_TAG + units.astype("<u8").tobytes()
    return units.astype("<u4").tobytes()


def page_digest(parent: bytes, tokens: Sequence[int], bigrams: bool) -> bytes:
    """The whole digest of one page. parent: the digest before, or the salt's seed, or nothing."""
    return hashlib.sha256(parent + page_bytes(tokens, bigrams)).digest()


def page_hash(digest: bytes, namespace: bytes) -> int:
    """The hash as an index key: unsigned. namespace: a LoRA's seed, or nothing."""
    first = digest[:8]
    if namespace:
        first = hashlib.sha256(namespace + first).digest()[:8]
    return int.from_bytes(first, "big")


def page_chain(
    algo: str,
    parent: bytes | None,
    token_ids: NDArray[np.int64],
    page_size: int,
    cache_salt: str | None,
    extra_key: str | None,
) -> tuple[NDArray[np.uint64], bytes]:
    """Hashes of the successive full pages of `token_ids` (from 0 to 2**63-1), the first one after `parent`, and the
    digest of the last (of the parent if there is none).

    parent: None for the first page of a prompt; only then `cache_salt` counts."""
    lookahead = LOOKAHEAD_TOKENS[algo]
    bigrams = lookahead > 0
    tail = parent if parent is not None else salt_seed(cache_salt) if cache_salt else b""
    namespace = b"" if extra_key is None else namespace_seed(extra_key)
    pages = max(0, len(token_ids) - lookahead) // page_size
    hashes = np.empty(pages, np.uint64)
    last = hash_pages(tail, token_ids, page_size, bigrams, namespace, hashes)
    if last is not None:
        return hashes, last
    ids = token_ids.tolist()
    for i in range(pages):
        tail = page_digest(tail, ids[i * page_size : (i + 1) * page_size + lookahead], bigrams)
        hashes[i] = page_hash(tail, namespace)
    return hashes, tail
