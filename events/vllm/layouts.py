# SPDX-License-Identifier: Apache-2.0
"""The layouts of events on the wire, for a reader that builds as little as possible.

There is one struct for each event type and layout. Block hashes stay bytes (`msgspec.Raw`), and token ids are skipped.
The structs are tolerant: missing fields have defaults, unknown fields and extra positions are skipped, and a field of
the wrong type fails only its event. `wire.py` has the events as they are written.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

_NIL = msgspec.Raw(b"\xc0")

_Hash: TypeAlias = int | bytes
# A larger group index is damage: vLLM packs it into 32 bits (v1/kv_offload/base.py:26).
_GroupIdx: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0x7FFF_FFFF)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


# Maps: a field that a struct does not name is skipped without being built.
class MapStored(msgspec.Struct, tag="BlockStored", gc=False):
    """A `BlockStored` event as a map, without tokens."""

    block_hashes: msgspec.Raw
    parent_block_hash: _Hash | None = None
    block_size: _Tokens = 0
    medium: str | None = None
    lora_name: str | None = None
    group_idx: _GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Tokens | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class MapStoredWithTokens(MapStored, tag="BlockStored", gc=False):
    """A `BlockStored` event as a map, with tokens."""

    token_ids: msgspec.Raw = _NIL
    extra_keys: msgspec.Raw = _NIL
    # SGLang has this field instead of extra keys.
    cache_salt: str | None = None


class MapRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """A `BlockRemoved` event as a map."""

    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: _GroupIdx | None = None
    locality: str | None = None
    ownership: str | None = None


class MapCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """An `AllBlocksCleared` event as a map."""

    medium: str | None = None
    group_idx: _GroupIdx | None = None


# Arrays: every position must be named; a field of type Raw keeps a view of the bytes and builds nothing.
class ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """A `BlockStored` event as an array."""

    block_hashes: msgspec.Raw
    parent_block_hash: _Hash | None = None
    token_ids: msgspec.Raw = _NIL
    block_size: _Tokens = 0
    lora_id: msgspec.Raw = _NIL
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
    group_idx: _GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Tokens | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """A `BlockRemoved` event as an array."""

    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: _GroupIdx | None = None
    locality: str | None = None
    ownership: str | None = None


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """An `AllBlocksCleared` event as an array."""

    medium: str | None = None
    group_idx: _GroupIdx | None = None


class RawBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are not decoded."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class MapTag(msgspec.Struct):
    """The type of an event in the map layout."""

    type: str


_MapEvent: TypeAlias = MapStored | MapRemoved | MapCleared
_MapTokenEvent: TypeAlias = MapStoredWithTokens | MapRemoved | MapCleared
_ArrayEvent: TypeAlias = ArrayStored | ArrayRemoved | ArrayCleared
LeanEvent: TypeAlias = _MapEvent | _MapTokenEvent | _ArrayEvent


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapEvent]
    data_parallel_rank: int | None = None


class _MapTokenBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapTokenEvent]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayEvent]
    data_parallel_rank: int | None = None


LeanBatch: TypeAlias = _MapBatch | _MapTokenBatch | _ArrayBatch


class Decoders:
    """The typed decoders of one mode: for each layout, one of a whole batch and one of an event."""

    def __init__(self, map_batch: type[_MapBatch] | type[_MapTokenBatch], map_event: Any) -> None:
        self.map_batch: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(map_batch)
        self.map_event: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(map_event)
        self.array_batch = msgspec.msgpack.Decoder(_ArrayBatch)
        self.array_event: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_ArrayEvent)


LEAN = Decoders(_MapBatch, _MapEvent)
WITH_TOKENS = Decoders(_MapTokenBatch, _MapTokenEvent)
