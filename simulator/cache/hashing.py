# SPDX-License-Identifier: Apache-2.0
"""vLLM's default block hash: a SHA-256 chain over pickled (parent, tokens, extra keys).

This hashing shares no code with the router's on purpose: each must equal vLLM's, and shared code could hide a mistake.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence

# vLLM's seed of the root hash if PYTHONHASHSEED is unset (vLLM 0.32.0 kv_cache_utils.py:123 DEFAULT_NONE_HASH_SEED).
DEFAULT_SEED = "vllm-none-hash"


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def root_hash(seed: str = DEFAULT_SEED) -> bytes:
    """Return the 32 bytes that stand in for the parent of a first block."""
    return _digest(seed)


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, root: bytes, cache_salt: str | None = None
) -> None:
    """Append to `hashes` the hash of every full block of `tokens` that has none yet.

    `hashes` has one 32-byte hash for each block of `block_size` tokens, in prompt order. The salt enters the first
    block only, and through the chain all others. Source: vLLM 0.32.0 kv_cache_utils.py:941 get_request_block_hasher.
    """
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        extra = (("cache_salt", cache_salt),) if cache_salt and start == 0 else None
        parent = _digest((parent, tuple(tokens[start : start + block_size]), extra))
        hashes.append(parent)
