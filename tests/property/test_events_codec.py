# SPDX-License-Identifier: Apache-2.0
"""Any bytes decode to a batch or raise CodecError, and both layouts decode to the same events."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.events.vllm.codec import BatchDecoder, CodecError, encode_batch
from kvrouter.events.vllm.messages import BlockRemoved, BlockStored, EventBatch
from kvrouter.events.vllm.wire import WireCleared, WireRemoved, WireStored
from tests.support.examples import examples

texts = st.none() | st.text(max_size=5)
hashes = (
    st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32)
)
dense = st.lists(st.integers(1 << 32, (1 << 64) - 1), max_size=40)
hash_lists = dense | st.lists(hashes, max_size=20)
groups = st.none() | st.integers(0, 9)
media = st.sampled_from([None, "GPU", "cpu", "STORAGE", "Fs"])
stored = st.builds(
    WireStored,
    hash_lists,
    st.none() | hashes,
    st.lists(st.integers(0, 300_000), max_size=40),
    st.integers(0, 4096),
    st.none() | st.integers(0, 9),
    media,
    texts,
    st.none() | st.lists(st.none() | st.tuples(texts), max_size=3),
    groups,
    st.sampled_from([None, "full_attention", "mamba"]),
    st.none() | st.integers(0, 9999),
)
removed = st.builds(WireRemoved, hash_lists, media, groups)
cleared = st.builds(WireCleared)
batches = st.lists(stored | removed | cleared, max_size=6)

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)
names = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
fields = st.sampled_from([*WireStored.__struct_fields__, "later"])
near_maps = st.builds(lambda tag, rest: {"type": tag} | rest, names, st.dictionaries(fields, junk, max_size=6))
near_arrays = st.builds(lambda tag, rest: [tag, *rest], names, st.lists(junk, max_size=14))


def read(payload: bytes) -> list[EventBatch]:
    """Decode the payload with and without tokens; empty if it is no batch. Any other exception fails the test."""
    decoded = []
    for with_tokens in (False, True):
        try:
            decoded.append(BatchDecoder().decode(payload, with_tokens=with_tokens))
        except CodecError:
            continue
    for batch in decoded:
        for event in batch.events:
            if isinstance(event, BlockStored | BlockRemoved):
                assert event.block_hashes.dtype.str[1:] == "u8"
                assert event.medium == event.medium.upper() != ""
    return decoded


def low64(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % (1 << 64)


@given(batches, st.sampled_from(["map", "array"]), st.none() | st.integers(0, 7))
def test_encoded_batches_decode_to_the_same_events(events: list[Any], layout: Any, rank: int | None) -> None:
    # The layout is written by hand, because `encode_batch` reduces digests, and digests must reach the decoder too.
    body: list[Any] = events
    if layout == "array":
        body = [[event.__struct_config__.tag, *msgspec.structs.astuple(event)] for event in events]
    lean, full = read(msgspec.msgpack.encode([1.5, body, rank]))
    for batch in (lean, full):
        assert (batch.ts, batch.dp_rank, batch.broken, batch.unknown) == (1.5, rank, [], 0)
        assert len(batch.events) == len(events)
        for got, sent in zip(batch.events, events, strict=True):
            if isinstance(sent, WireStored):
                assert isinstance(got, BlockStored)
                assert got.parent_block_hash == (
                    None if sent.parent_block_hash is None else low64(sent.parent_block_hash)
                )
                assert (got.block_size, got.group_idx, got.kind) == (
                    sent.block_size,
                    sent.group_idx,
                    sent.kv_cache_spec_kind,
                )
                assert got.lora_name == sent.lora_name
            if isinstance(sent, WireStored | WireRemoved):
                assert isinstance(got, BlockStored | BlockRemoved)
                assert got.block_hashes.tolist() == [low64(value) for value in sent.block_hashes]
                assert got.medium == (sent.medium or "GPU").upper()
    for got, sent in zip(full.events, events, strict=True):
        if isinstance(sent, WireStored):
            assert isinstance(got, BlockStored)
            assert got.token_ids is not None
            assert got.token_ids.tolist() == sent.token_ids


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_codec_errors(payload: bytes) -> None:
    read(payload)
    read(b"\x92\x01" + payload)
    read(b"\x92\x01\x91" + payload)


@given(st.lists(near_maps | near_arrays | junk, max_size=5), junk)
def test_well_formed_nonsense_costs_only_its_events(events: list[Any], rank: Any) -> None:
    for batch in read(msgspec.msgpack.encode([1.0, events, 0])):
        assert len(batch.events) + len(batch.broken) + batch.unknown == len(events)
    assert len(read(msgspec.msgpack.encode([1.0, events, 0]))) == 2
    read(msgspec.msgpack.encode([rank, events, rank]))


@settings(max_examples=examples(300))
@given(batches, st.sampled_from(["map", "array"]), st.data())
def test_mutated_and_truncated_batches_raise_only_codec_errors(
    events: list[Any], layout: Any, data: st.DataObject
) -> None:
    payload = bytearray(encode_batch(1.0, events, 0, layout=layout))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(payload) - 1))
        change = data.draw(st.binary(min_size=1, max_size=6))
        payload[place : place + data.draw(st.integers(0, 6))] = change
    read(bytes(payload))
    read(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


@given(
    st.sampled_from([0x91, 0x81, 0xDC, 0xDD, 0xDE, 0xDF, 0xC4, 0xC6, 0xC9, 0xD9, 0xDB]),
    st.integers(0, 3000),
    st.binary(max_size=8),
)
def test_huge_lengths_and_deep_nesting_raise_only_codec_errors(marker: int, depth: int, tail: bytes) -> None:
    inner = bytes([marker, 0xFF, 0xFF, 0xFF, 0xFF]) + tail
    read(b"\x92\x01\x91" + b"\x91" * depth + inner)
    read(b"\x92\x01\x91" + b"\x81\x00" * depth + inner)
    body = (
        b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("BlockStored") + msgspec.msgpack.encode("x")
    )
    read(b"\x92\x01\x91" + body + b"\x91" * depth + inner)
