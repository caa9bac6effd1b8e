# SPDX-License-Identifier: Apache-2.0
"""The codec of event batches, in both of vLLM's encodings: maps (0.24 and later) and arrays (up to 0.23).

SGLang writes the same two (ADR 38). One broken event costs that event, never its batch; an unknown field or event type
is no error. Only a payload that is no batch at all raises `CodecError`, and nothing else is ever raised, whatever the
bytes.

The fast path is one typed decode of the whole batch in which token ids are never built, then one numpy pass over all
hashes. Only when that fails are the events decoded one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvrouter.events.vllm.hashes import MASK_64, parse_hashes, parse_many, reduce_hash
from kvrouter.events.vllm.layouts import (
    LEAN,
    WITH_TOKENS,
    ArrayCleared,
    ArrayRemoved,
    ArrayStored,
    Decoders,
    LeanBatch,
    LeanEvent,
    MapCleared,
    MapRemoved,
    MapStored,
    MapStoredWithTokens,
    MapTag,
    RawBatch,
)
from kvrouter.events.vllm.messages import (
    DECODE_ERRORS,
    GPU,
    MAX_ERROR_CHARS,
    MAX_NAME_CHARS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BrokenEvent,
    Event,
    EventBatch,
    HashArray,
)
from kvrouter.events.vllm.wire import WireBatch, WireEvent, WireHash, WireRemoved, WireStored

Layout: TypeAlias = Literal["map", "array"]
HashForm: TypeAlias = Literal["int", "bytes32", "bytes16"]

_KNOWN_TAGS = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))

# Tuples for isinstance: a union would be built at each call.
_REMOVED = (MapRemoved, ArrayRemoved)
_CLEARED = (MapCleared, ArrayCleared)
_WITH_TOKEN_IDS = (MapStoredWithTokens, ArrayStored)


class CodecError(ValueError):
    """A payload that is no event batch."""


_raw_batch = msgspec.msgpack.Decoder(RawBatch)
_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_text = msgspec.msgpack.Decoder(str)
_map_tag = msgspec.msgpack.Decoder(MapTag)
_token_list = msgspec.msgpack.Decoder(list[int] | None)
_pair_list = msgspec.msgpack.Decoder(list[tuple[int, int]])
_any_list = msgspec.msgpack.Decoder(list[Any] | None)
_encoder = msgspec.msgpack.Encoder()


class BatchDecoder:
    """A decoder of payloads, which remembers the layout of the last batch and nothing else. Use one for each stream."""

    def __init__(self) -> None:
        self._arrays = False

    def decode(self, payload: bytes | memoryview, *, with_tokens: bool = False) -> EventBatch:
        """Return the batch in `payload`. Raises CodecError if it is none.

        With `with_tokens`, `token_ids` and `extra_keys` of stored blocks are built too (several times slower).
        """
        decoders = WITH_TOKENS if with_tokens else LEAN
        batch = self._typed(payload, decoders)
        if batch is None:
            return _event_by_event(payload, decoders, with_tokens)
        raws = [event.block_hashes for event in batch.events if not isinstance(event, _CLEARED)]
        parsed = parse_many(raws) if raws else []
        # None if some array is not a plain table: then each event reads its own hashes.
        ready = None if parsed is None else iter(parsed)
        events: list[Event] = []
        broken: list[BrokenEvent] = []
        for lean in batch.events:
            try:
                events.append(_event(lean, ready, with_tokens))
            except DECODE_ERRORS as error:
                broken.append(_broken(_tag_of(lean), error))
        return EventBatch(batch.ts, events, batch.data_parallel_rank, broken, 0)

    def _typed(self, payload: bytes | memoryview, decoders: Decoders) -> LeanBatch | None:
        for arrays in (self._arrays, not self._arrays):
            decoder = decoders.array_batch if arrays else decoders.map_batch
            try:
                batch: LeanBatch = decoder.decode(payload)
            except DECODE_ERRORS:
                continue
            self._arrays = arrays
            return batch
        return None


def read_event(raw: bytes) -> Event | None:
    """Return one event of a batch, without tokens; None if it cannot be decoded or has an unknown type."""
    try:
        decoder = LEAN.array_event if _is_array(raw) else LEAN.map_event
        return _event(decoder.decode(raw), None, False)
    except DECODE_ERRORS:
        return None


def encode_batch(
    ts: float,
    events: Sequence[WireEvent],
    dp_rank: int | None = None,
    *,
    layout: Layout = "map",
    hash_form: HashForm = "int",
) -> bytes:
    """Return the payload that vLLM would send for these events.

    Args:
        ts: Seconds since 1970.
        events: The events, in order.
        dp_rank: The data-parallel rank, if the engine has one.
        layout: "map" as in vLLM 0.24 to 0.32; "array" as in 0.22.1 to 0.23, which has no locality, ownership or
            session.
        hash_form: "int" as by default; "bytes32" and "bytes16" as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 (SHA-256,
            xxhash). In these, an integer becomes the last 8 bytes of a digest that is otherwise zero.
    """
    shaped = [_with_hash_form(event, hash_form) for event in events]
    body: list[Any] = shaped if layout == "map" else [_positional(event) for event in shaped]
    return _encoder.encode(WireBatch(ts, body, dp_rank))


def _event_by_event(payload: bytes | memoryview, decoders: Decoders, with_tokens: bool) -> EventBatch:
    try:
        batch = _raw_batch.decode(payload)
    except DECODE_ERRORS as error:
        raise CodecError(f"not an event batch: {_short(error)}") from None
    events: list[Event] = []
    broken: list[BrokenEvent] = []
    unknown = 0
    for raw in batch.events:
        arrays = _is_array(raw)
        decoder = decoders.array_event if arrays else decoders.map_event
        try:
            events.append(_event(decoder.decode(raw), None, with_tokens))
        except DECODE_ERRORS as error:
            tag = _read_tag(raw, arrays)
            if tag is None or tag in _KNOWN_TAGS:
                broken.append(_broken(tag, error))
            else:
                unknown += 1
    return EventBatch(batch.ts, events, batch.data_parallel_rank, broken, unknown)


def _event(lean: LeanEvent, ready: Iterator[HashArray] | None, with_tokens: bool) -> Event:
    if isinstance(lean, _CLEARED):
        return _cleared(lean)
    hashes = parse_hashes(lean.block_hashes) if ready is None else next(ready)
    if isinstance(lean, _REMOVED):
        return _removed(lean, hashes)
    return _stored(lean, hashes, with_tokens)


def _stored(lean: MapStored | ArrayStored, hashes: HashArray, with_tokens: bool) -> BlockStored:
    parent = lean.parent_block_hash
    kind = lean.kv_cache_spec_kind
    token_ids = extra_keys = None
    if with_tokens and isinstance(lean, _WITH_TOKEN_IDS):
        token_ids = _read_tokens(lean.token_ids)
        extra_keys = _read_extra_keys(lean.extra_keys)
        if extra_keys is None and isinstance(lean, MapStoredWithTokens) and lean.cache_salt:
            extra_keys = (tuple(name for name in (lean.lora_name, lean.cache_salt) if name is not None),)
    return BlockStored(
        hashes,
        None if parent is None else reduce_hash(parent),
        lean.block_size,
        _medium(lean.medium),
        lean.group_idx,
        None if kind is None else _name(kind).lower(),
        lean.kv_cache_spec_sliding_window,
        None if lean.locality is None else lean.locality.upper(),
        None if lean.ownership is None else _name(lean.ownership),
        lean.lora_name,
        extra_keys,
        token_ids,
        lean.session_id,
    )


def _removed(lean: MapRemoved | ArrayRemoved, hashes: HashArray) -> BlockRemoved:
    locality = lean.locality
    return BlockRemoved(
        hashes,
        _medium(lean.medium),
        lean.group_idx,
        None if locality is None else locality.upper(),
        None if lean.ownership is None else _name(lean.ownership),
    )


def _cleared(lean: MapCleared | ArrayCleared) -> AllBlocksCleared:
    return AllBlocksCleared(None if lean.medium is None else _medium(lean.medium), lean.group_idx)


def _medium(name: str | None) -> str:
    if name is None or name == GPU:
        return GPU
    if not name:
        raise ValueError("the medium is an empty string")
    return _name(name).upper()


def _name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS:
        raise ValueError(f"a name of {len(name)} characters: expected at most {MAX_NAME_CHARS}")
    return name


def _read_tokens(raw: msgspec.Raw) -> npt.NDArray[np.int64]:
    try:
        return np.array(_token_list.decode(raw) or (), dtype=np.int64)
    except msgspec.ValidationError:
        # SGLang with EAGLE sends each token with the one after it.
        pairs = _pair_list.decode(raw)
        return np.array([*(first for first, _ in pairs), *(last for _, last in pairs[-1:])], dtype=np.int64)


def _read_extra_keys(raw: msgspec.Raw) -> tuple[Any, ...] | None:
    keys = _any_list.decode(raw)
    return None if keys is None else tuple(_frozen(entry) for entry in keys)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _is_array(raw: msgspec.Raw | bytes) -> bool:
    first = memoryview(raw)[0]
    return bool(first & 0xF0 == 0x90 or first in (0xDC, 0xDD))


def _read_tag(raw: msgspec.Raw, arrays: bool) -> str | None:
    try:
        if arrays:
            return _text.decode(_raw_list.decode(raw)[0])
        return _map_tag.decode(raw).type
    except (*DECODE_ERRORS, IndexError):
        return None


def _tag_of(lean: LeanEvent) -> str:
    return str(lean.__struct_config__.tag)


def _broken(tag: str | None, error: BaseException) -> BrokenEvent:
    return BrokenEvent(tag, _short(error))


def _short(error: BaseException) -> str:
    return str(error)[:MAX_ERROR_CHARS] or type(error).__name__


def _positional(event: WireEvent) -> list[Any]:
    tag = event.__struct_config__.tag
    fields = list(msgspec.structs.astuple(event))
    if isinstance(event, WireStored):
        return [tag, *fields[:11]]
    if isinstance(event, WireRemoved):
        return [tag, *fields[:3]]
    # A field at its default is left out, so that the bytes of stock events are those of stock vLLM.
    while fields and fields[-1] is None:
        fields.pop()
    return [tag, *fields]


def _with_hash_form(event: WireEvent, form: HashForm) -> WireEvent:
    if not isinstance(event, WireStored | WireRemoved):
        return event
    parent = event.parent_block_hash if isinstance(event, WireStored) else None
    if form == "int" and not isinstance(parent, bytes) and not any(type(h) is bytes for h in event.block_hashes):
        return event
    shaped = [_as_form(value, form) for value in event.block_hashes]
    if isinstance(event, WireStored):
        parent = None if parent is None else _as_form(parent, form)
        return msgspec.structs.replace(event, block_hashes=shaped, parent_block_hash=parent)
    return msgspec.structs.replace(event, block_hashes=shaped)


def _as_form(value: WireHash, form: HashForm) -> WireHash:
    if form == "int":
        return value if isinstance(value, int) else reduce_hash(value)
    if isinstance(value, bytes):
        return value
    return (value & MASK_64).to_bytes(32 if form == "bytes32" else 16, "big")
