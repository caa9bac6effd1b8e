# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hashes, recomputed: SHA-256 of the previous page's whole digest and the token ids, 4 bytes each.

Events carry the first 8 bytes of a digest. A cache salt takes the place of the first page's parent. The namespace of a
LoRA is not part of the chain: each hash of the chain is hashed once more with the namespace. With EAGLE a page consists
of pairs of successive tokens, so its hash covers one token after the page.
Source: SGLang 0.5.23 srt/mem_cache/utils.py:116, events.py:190, disaggregation/kv_events.py:312,
cpp_utils/hash_binding.cpp.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.kvcache.chain_hash import hash_pages
from kvrouter.router.model.workers.hash_algorithms import LOOKAHEAD_TOKENS

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"

# Put before the bytes of a page whose ids are written in 8 bytes each, because one of them does not fit in 4. The
# length is then odd, which that of no other page is, so the two forms cannot be confused.
_WIDE_TAG = b"\xff"

# Each id of a page is written in this number of bytes, unless one of them does not fit.
ID_BYTES = 4


def salt_seed(cache_salt: str) -> bytes:
    """Return the bytes that stand for the parent of the first page of prompts with this salt."""
    return hashlib.sha256(_SALT_TAG + cache_salt.encode("utf-8", "surrogatepass")).digest()


def namespace_seed(extra_key: str) -> bytes:
    """Return the bytes that are hashed before each page hash of a LoRA.

    Args:
        extra_key: The engine's own name for the prompts of the LoRA, which ends in the id that the engine assigned.
    """
    encoded = extra_key.encode("utf-8", "surrogatepass")
    part = b"\x01" + len(encoded).to_bytes(8, "little") + encoded
    return hashlib.sha256(_NAMESPACE_TAG + part + b"\x00").digest()


def page_bytes(tokens: Sequence[int], bigrams: bool) -> bytes:
    """Return the bytes of one page that are hashed after its parent.

    Args:
        tokens: The ids of the page; with `bigrams` also the id after it.
        bigrams: Whether the page consists of pairs of successive ids.
    """
    ids = np.asarray(tokens, np.uint64)
    units = np.stack((ids[:-1], ids[1:]), 1).ravel() if bigrams else ids
    wide = bool(ids.size) and int(ids.max()) >= 1 << 8 * ID_BYTES
    if wide:
        return _WIDE_TAG + units.astype("<u8").tobytes()
    return units.astype("<u4").tobytes()


def page_digest(parent: bytes, tokens: Sequence[int], bigrams: bool) -> bytes:
    """Return the whole digest of one page.

    Args:
        parent: The digest of the page before; for a first page the salt's seed, or b"" without a salt.
        tokens: The ids of the page; with `bigrams` also the id after it.
        bigrams: Whether the page consists of pairs of successive ids.
    """
    return hashlib.sha256(parent + page_bytes(tokens, bigrams)).digest()


def page_hash(digest: bytes, namespace: bytes) -> int:
    """Return the hash of a page as an index key, which is unsigned; `namespace` is a LoRA's seed, or b""."""
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
    """Hash the successive full pages of a prompt or of a part of it.

    Args:
        algo: A key of LOOKAHEAD_TOKENS.
        parent: The digest of the page before the first one, or None at the beginning of a prompt.
        token_ids: Ids from 0 to 2**63-1, including the tokens after the last page that its hash covers.
        page_size: Tokens of a page.
        cache_salt: The salt of the prompt, which counts only if `parent` is None.
        extra_key: The engine's own name for the prompts of the LoRA, or None without one.

    Returns:
        The hash of each page, and the digest of the last page. Without any full page, the digest is that of the parent.
    """
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
