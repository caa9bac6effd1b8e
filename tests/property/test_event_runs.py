# SPDX-License-Identifier: Apache-2.0
"""The pass over whole batches against the decoder of single events.

The pass reads each batch that it accepts exactly as the decoder does, whatever the bytes; and a worker that is followed
with the pass ends in the same state as without it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrouter.events.vllm.codec import BatchDecoder, CodecError, encode_batch
from kvrouter.events.vllm.messages import GPU
from kvrouter.events.vllm.stream_items import Batch, StreamItem
from kvrouter.events.vllm.wire import WireCleared, WireRemoved, WireStored
from kvrouter.router.base.common.compiled import wanted
from kvrouter.router.index.ingest.event_runs import EventRun, RunBatch, RunReader
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from tests.support.event_sections import sections
from tests.support.examples import examples
from tests.support.ingest_steps import live

HASHES = st.integers(-(1 << 63), (1 << 64) - 1) | st.sampled_from([0, 127, 128, 1 << 16, 1 << 32, -1, -33, -(1 << 20)])
ANY_HASHES = HASHES | st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32)
# Few shapes, so that runs form.
SHAPES = st.sampled_from([(0, "full_attention", None), (1, "sliding_window", 64), (None, None, None)])
MEDIA = st.sampled_from([GPU, GPU, GPU, None, "gpu", "CPU"])


def stored(hashes: list[Any], parent: Any, shape: tuple[Any, ...], medium: str | None, **more: Any) -> WireStored:
    group, kind, window = shape
    return WireStored(
        hashes, parent, list(range(70_000, 70_000 + 16 * len(hashes))), 16, None, medium, None,
        group_idx=group, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window, **more,
    )  # fmt: skip


def events_of(
    hashes: st.SearchStrategy[Any],
    shapes: st.SearchStrategy[Any] = SHAPES,
    media: st.SearchStrategy[Any] = MEDIA,
) -> st.SearchStrategy[list[Any]]:
    lists = st.lists(hashes, max_size=5)
    stores = st.builds(
        stored, lists, st.none() | hashes, shapes, media, session_id=st.none() | st.text("ab", max_size=40)
    )
    removals = st.builds(WireRemoved, lists, media, shapes.map(lambda shape: shape[0]))
    return st.lists(stores | stores | removals | st.builds(WireCleared), max_size=12)


def payload_of(events: Sequence[Any], layout: str, rank: int | None) -> bytes:
    """Encode a batch as vLLM sends it, with digests unchanged."""
    if layout == "map":
        return msgspec.msgpack.encode([1.5, events, rank])
    return msgspec.msgpack.encode([1.5, [[e.__struct_config__.tag, *msgspec.structs.astuple(e)] for e in events], rank])


def check(payload: bytes) -> RunBatch | None:
    """Read the payload twice, the second time with known shapes, and compare both results with the decoder's."""
    reader = RunReader()
    first, second = reader.read([payload]), reader.read([payload])
    assert (first is None) == (second is None)
    if first is None or second is None:
        return None
    batch = BatchDecoder().decode(payload)
    assert (batch.broken, batch.unknown) == ([], 0)
    for run_batch in (first, second):
        assert run_batch.dp_rank == batch.dp_rank
        assert sections(run_batch.runs) == sections(batch.events)
    return first


@settings(max_examples=examples(300))
@given(events_of(HASHES) | events_of(ANY_HASHES), st.sampled_from(["map", "array"]), st.none() | st.integers(0, 70_000))
def test_plain_batches_are_read_as_the_decoder_reads_them(events: list[Any], layout: str, rank: int | None) -> None:
    run_batch = check(payload_of(events, layout, rank))
    assert (run_batch is not None) is wanted()


@pytest.mark.skipif(not wanted(), reason="uncompiled, it leaves all to the decoder")
def test_hashes_of_one_shape_keep_their_order() -> None:
    shape = (0, "full_attention", None)
    events = [stored([3, 2], None, shape, GPU), stored([9], 2, (1, "mamba", None), GPU), stored([1], 2, shape, GPU)]
    run_batch = check(encode_batch(1.0, events))
    assert run_batch is not None
    read = [(run.hashes.tolist(), run.count, run.roots.tolist()) for run in run_batch.runs if isinstance(run, EventRun)]
    assert read == [([3, 2, 1], 2, [3]), ([9], 1, [])]


@settings(max_examples=examples(1_000))
@given(events_of(ANY_HASHES), st.sampled_from(["map", "array"]), st.data())
def test_mutated_batches_are_read_alike_or_left_to_the_decoder(
    events: list[Any], layout: str, data: st.DataObject
) -> None:
    payload = bytearray(payload_of(events, layout, 0))
    for _ in range(data.draw(st.integers(1, 3))):
        # A mutation may have removed all bytes.
        place = data.draw(st.integers(0, max(0, len(payload) - 1)))
        if data.draw(st.booleans()):
            payload[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
        else:
            payload[place : place + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    check(bytes(payload))
    check(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


@pytest.mark.skipif(not wanted(), reason="uncompiled, it leaves all to the decoder")
def test_a_batch_that_is_not_joined_changes_nothing_of_the_runs() -> None:
    shape = (0, "full_attention", None)
    own = payload_of([stored([1], None, shape, GPU)], "map", 0)
    foreign = payload_of([stored([2, 3], None, shape, GPU)], "map", 1)
    runs = [RunReader().read([own, *more]) for more in ([], [foreign], [foreign[:-1]])]
    assert [run.batches for run in runs if run] == [1, 1, 1]
    read = [
        (r.hashes.tolist(), r.count, r.roots.tolist(), r.several)
        for b in runs
        if b
        for r in b.runs
        if isinstance(r, EventRun)
    ]
    assert read == [([1], 1, [1], False)] * 3


@settings(max_examples=examples(500))
@given(
    st.lists(
        st.tuples(events_of(HASHES), st.sampled_from(["map", "array"]), st.sampled_from([0, 0, 1]), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    )
)
def test_batches_are_joined_up_to_one_that_is_not_plain_or_of_another_rank_or_has_a_single_event(
    drawn: list[tuple[list[Any], str, int, int]],
) -> None:
    payloads = []
    for events, layout, rank, damage in drawn:
        payload = payload_of(events, layout, rank)
        # One payload in ten is cut off.
        payloads.append(payload if damage else payload[:-1])
    joined = RunReader().read(payloads)
    alone = [RunReader().read([payload]) for payload in payloads]
    taken = []
    for run in alone:
        if run is None or run.dp_rank != drawn[0][2]:
            break
        taken.append(run)
        if not all(isinstance(event, EventRun) for event in run.runs):
            break
    if joined is None:
        assert taken == []
        return
    assert (joined.batches, joined.dp_rank) == (len(taken), drawn[0][2])
    decoded = [event for payload in payloads[: len(taken)] for event in BatchDecoder().decode(payload).events]
    assert sections(joined.runs) == sections(decoded)


@given(
    st.binary(max_size=200), st.sampled_from([0x90, 0x9F, 0x8F, 0xDC, 0xDD, 0xDE, 0xDF, 0xC4, 0xC6, 0xD9, 0xDB, 0xC7])
)
@example(b"\xff" * 8, 0xDD)
def test_no_length_leads_out_of_the_payload(tail: bytes, marker: int) -> None:
    time = b"\x93\xcb" + bytes(8)
    tag = b"\xa4type\xabBlockStored"
    for head in (b"", time, time + b"\x91", time + b"\x91\x83" + tag, time + b"\x91\x83" + tag + b"\xacblock_hashes"):
        for body in (tail, bytes([marker]) + tail, bytes([marker, 0xFF, 0xFF, 0xFF, 0xFF]) + tail):
            try:
                BatchDecoder().decode(head + body)
            except CodecError:
                assert RunReader().read([head + body]) is None
            else:
                check(head + body)


def followed(payloads: Sequence[bytes], first_seq: int, *, by_runs: bool) -> Ingest:
    """Follow the batches, joined and as runs, or else one by one with the general decoder."""
    ingest = live()
    ingest.allow_ranks(frozenset({0}))
    ingest.profile.identity.standing = SchemeState.VERIFIED
    items = deque[StreamItem](Batch(seq, payload, seq, False) for seq, payload in enumerate(payloads, first_seq))
    if not by_runs:
        ingest.stock._reader.read = lambda payloads: None  # type: ignore[method-assign]
    while items:
        ingest.apply_next(items, 1.0)
    return ingest


SETTLED = SHAPES.filter(lambda shape: shape[0] is not None)
FEW_HASHES = st.integers(1, 12).map(lambda n: n << 40)
# Batches of these teach all that there is to learn of the settled shapes.
LESSONS = [
    [
        stored([n << 40, n + 1 << 40], None, shape, GPU)
        for shape in ((0, "full_attention", None), (1, "sliding_window", 64))
    ]
    for n in (20, 22)
]


def batches_of(events: st.SearchStrategy[list[Any]], ranks: Sequence[int | str | None]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(events, st.sampled_from(ranks)), min_size=1, max_size=24)


@settings(max_examples=examples(300))
@given(
    batches_of(events_of(FEW_HASHES, SETTLED, st.just(GPU)), [0])
    | batches_of(events_of(FEW_HASHES, SETTLED, st.just(GPU)), [0, 0, 0, 0, 0, 0, None, 1, 1, "broken"])
    | batches_of(events_of(FEW_HASHES), [0]),
    st.integers(0, 1),
    st.sampled_from(["map", "array"]),
)
def test_a_worker_is_known_alike_either_way(
    batches: list[tuple[list[Any], int | str | None]], first_seq: int, layout: str
) -> None:
    """Compare joined batches with single ones, among them batches of another rank and unreadable ones."""
    payloads = [payload_of(events, layout, 0) for events in LESSONS] + [
        payload_of(events, layout, 0)[:-2] if isinstance(rank, str) else payload_of(events, layout, rank)
        for events, rank in batches
    ]
    by_runs_ingest, decoded_ingest = (followed(payloads, first_seq, by_runs=by_runs) for by_runs in (True, False))
    assert by_runs_ingest.held.blocks.sums() == decoded_ingest.held.blocks.sums()
    assert by_runs_ingest.profile.tally == decoded_ingest.profile.tally
    assert by_runs_ingest.profile.learner.dump() == decoded_ingest.profile.learner.dump()
    assert (by_runs_ingest.state, by_runs_ingest.reason) == (decoded_ingest.state, decoded_ingest.reason)
    assert (by_runs_ingest.held.seq, by_runs_ingest.profile.contact) == (
        decoded_ingest.held.seq,
        decoded_ingest.profile.contact,
    )
    flushes = [ingest.held.take() for ingest in (by_runs_ingest, decoded_ingest)]
    changes = [
        {c.place: (set(c.added.tolist()), set(c.removed.tolist())) for c in flush.changes} for flush in flushes if flush
    ]
    copies = [{(place, h): n for place, h, n in flush.copies} for flush in flushes if flush]
    assert changes[0] == changes[1]
    assert copies[0] == copies[1]


@pytest.mark.skipif(not wanted(), reason="uncompiled, it leaves all to the decoder")
def test_a_stream_of_known_shapes_is_read_by_runs() -> None:
    events = [stored([n << 40, n + 1 << 40], None, (0, "full_attention", None), GPU) for n in range(1, 9)]
    payload = payload_of(events, "map", 0)
    ingest = followed([payload], 0, by_runs=True)
    decoded = itertools.count()
    plain = ingest.stock._decoder.decode
    ingest.stock._decoder.decode = lambda *args, **named: (next(decoded), plain(*args, **named))[1]  # type: ignore[method-assign]
    ingest.apply(Batch(1, payload, 0, False), 1.0)
    ingest.apply(Batch(2, payload_of([WireRemoved([1 << 40], GPU, 0)], "map", 0), 0, False), 1.0)
    assert next(decoded) == 0
    assert ingest.profile.tally.events == 17
