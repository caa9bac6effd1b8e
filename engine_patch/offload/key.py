# SPDX-License-Identifier: Apache-2.0
"""The name of an offloaded chunk: the hash of its last block and its group, as bytes.

The bytes are those of vLLM (0.32 v1/kv_offload/base.py make_offload_key), so that the keys of vLLM's connector can be
used as they are. A key is bytes and not a tuple, because a tier holds a hundred thousand keys, and the garbage
collector would walk every tuple.
"""

from __future__ import annotations

from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)

GROUP_BYTES = 4
MAX_GROUP_IDX = 2 ** (8 * GROUP_BYTES) - 1
# vLLM's event hashes are the last 8 bytes of a hash, so no hash is shorter.
MIN_HASH_BYTES = 8
# SHA-256 has 32 bytes; up to 0.23 the hash of a block of several hash units is those of the units joined.
MAX_HASH_BYTES = 64
# Bytes of a hash that events carry (vLLM: maybe_convert_block_hash).
SHORT_HASH_BYTES = 8


def pack(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return the key of a chunk. Raise ValueError for a hash or a group that no engine has."""
    if not MIN_HASH_BYTES <= len(block_hash) <= MAX_HASH_BYTES:
        raise ValueError(f"a block hash has {MIN_HASH_BYTES} to {MAX_HASH_BYTES} bytes, not {len(block_hash)}")
    if not 0 <= group_idx <= MAX_GROUP_IDX:
        raise ValueError(f"a group index is 0 to {MAX_GROUP_IDX}, not {group_idx}")
    return OffloadKey(block_hash + group_idx.to_bytes(GROUP_BYTES, "big"))


def unpack(key: bytes) -> tuple[bytes, int]:
    """Return (block_hash, group_idx). Raise ValueError for bytes that `pack` cannot have made."""
    if not MIN_HASH_BYTES + GROUP_BYTES <= len(key) <= MAX_HASH_BYTES + GROUP_BYTES:
        raise ValueError(
            f"a key has {MIN_HASH_BYTES + GROUP_BYTES} to {MAX_HASH_BYTES + GROUP_BYTES} bytes, not {len(key)}"
        )
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


def group_of(key: bytes) -> int:
    """Return the group_idx of a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def short_hash(key: bytes) -> int:
    """Return the hash as events carry it, 64 bits."""
    return int.from_bytes(key[-GROUP_BYTES - SHORT_HASH_BYTES : -GROUP_BYTES], "big")


def order(key: bytes) -> tuple[int, bytes]:
    """Return a sort key that orders keys by group, then by hash, for output that is the same each time."""
    return group_of(key), key[:-GROUP_BYTES]
