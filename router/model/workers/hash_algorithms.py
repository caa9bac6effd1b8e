# SPDX-License-Identifier: Apache-2.0
"""The algorithms with which engines hash blocks, by the names under which workers declare them.

Source: vLLM 0.32.0 utils/hashing.py; SGLang 0.5.23 srt/mem_cache/utils.py.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable

import cbor2
import msgspec
import xxhash

# vLLM writes pickle.HIGHEST_PROTOCOL, which is 5 in every Python that runs vLLM. It is pinned here, because the Python
# of the router may have another one.
PICKLE_PROTOCOL = 5


def sha256(data: bytes) -> bytes:
    """Return the digest of 32 bytes."""
    return hashlib.sha256(data).digest()


pickled = functools.partial(pickle.dumps, protocol=PICKLE_PROTOCOL)
cbored = functools.partial(cbor2.dumps, canonical=True)


class HashAlgorithm(msgspec.Struct, frozen=True):
    """A serialisation and a digest, together one of vLLM's algorithms."""

    serialize: Callable[[object], bytes]
    # The last bytes of a serialised block without extra keys, from the position of the extra keys on.
    plain_ending: bytes
    digest: Callable[[bytes], bytes]
    digest_bytes: int
    # Whether vLLM draws a random seed in each process, because a predictable one would let an attacker precompute
    # collisions.
    secret_seed: bool


ALGORITHMS = {
    "sha256": HashAlgorithm(pickled, b"N\x87\x94.", sha256, 32, False),
    "sha256_cbor": HashAlgorithm(cbored, b"\xf6", sha256, 32, False),
    "xxhash": HashAlgorithm(pickled, b"N\x87\x94.", xxhash.xxh3_128_digest, 16, True),
    "xxhash_cbor": HashAlgorithm(cbored, b"\xf6", xxhash.xxh3_128_digest, 16, True),
}

# The algorithm of an engine that declares none. Source: vLLM 0.32.0 config/cache.py, prefix_caching_hash_algo.
DEFAULT_ALGO = "sha256"

# By SGLang's algorithm, the number of tokens after a page that its hash covers too; `kvcache/page_hash.py` computes them.
LOOKAHEAD_TOKENS = {"sglang": 0, "sglang_bigram": 1}

# Every name that a worker may declare.
HASH_ALGOS = (*ALGORITHMS, *LOOKAHEAD_TOKENS)
