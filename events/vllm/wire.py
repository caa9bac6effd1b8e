# SPDX-License-Identifier: Apache-2.0
"""Events as vLLM 0.32 writes them: same names, same field order, same defaults, so that the bytes are the same.

These structs are for senders (publisher, simulator, tests); readers get the structs of `messages.py`. Fields are
append-only: vLLM never reordered them, only added fields at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

WireHash: TypeAlias = int | bytes

# The size of a seq on the socket, which is big-endian.
SEQ_BYTES = 8
# The frame that vLLM sends in place of a seq at the end of a replay: -1. So a seq with the top bit set is damage.
END_SEQ = b"\xff" * SEQ_BYTES
MAX_SEQ = (1 << 63) - 1


def read_seq(frame: bytes) -> int | None:
    """Return the number in a seq frame; None if it has none."""
    if len(frame) != SEQ_BYTES:
        return None
    value = int.from_bytes(frame, "big")
    return value if value <= MAX_SEQ else None


class WireStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """`BlockStored` of vLLM 0.32.0 kv_events.py:56."""

    block_hashes: Sequence[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class WireRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """`BlockRemoved` of vLLM 0.32.0 kv_events.py:116."""

    block_hashes: Sequence[WireHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class WireCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """`AllBlocksCleared` of vLLM 0.32.0 kv_events.py:137, which has no fields; ours are omitted unless set."""

    medium: str | None = None
    group_idx: int | None = None


WireEvent: TypeAlias = WireStored | WireRemoved | WireCleared


class WireBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """`EventBatch` of vLLM 0.32.0 kv_events.py:31, which is always positional, whatever the form of its events."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None
