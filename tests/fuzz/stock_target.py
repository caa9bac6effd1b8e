# SPDX-License-Identifier: Apache-2.0
"""The fuzz target for the engine's own topic: from frames through `Cursor`, `BatchDecoder` and `Ingest` to an answer.

No input may raise an exception. The results are compared with slow recounts that share no code with the code under
test.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import msgspec

from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.codec import BatchDecoder, HashForm, Layout, encode_batch
from kvrouter.events.vllm.messages import AllBlocksCleared, BlockStored, EventBatch
from kvrouter.events.vllm.stream_items import Batch, GapLost, Proven, Restarted, RingReread
from kvrouter.events.vllm.wire import MAX_SEQ, WireCleared, WireRemoved, WireStored
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.counters import IngestCounters
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.workers.registration import Registration
from tests.fuzz.downstream import Downstream, Recount
from tests.fuzz.payload_target import REMOVING, golden_batches, read_stock
from tests.fuzz.script import Step, pack, unpack

LIVE, REPLAYED, ENDED, CONNECTED, DISCONNECTED, OVERDUE, FAILED, CHECK, FLUSH, KINDS = range(10)

MAX_HELD, MAX_HELD_BYTES = 6, 4_096
REGISTRATION = Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:2")


def run(data: bytes) -> None:
    """Run one input; raises AssertionError, or the exception of the code under test."""
    cursor = Cursor(replay=bool(data) and data[0] < 128, max_held=MAX_HELD, max_held_bytes=MAX_HELD_BYTES)
    epochs = itertools.count()
    ingest = Ingest(REGISTRATION, seed=None, decoder=BatchDecoder(), new_epoch=lambda: f"{next(epochs):016x}")
    recount = Recount()
    downstream = Downstream(REGISTRATION)
    for step in unpack(data):
        kind = step.kind % KINDS
        if kind == FLUSH:
            downstream.flush(ingest, recount)
            continue
        _say(cursor, kind, step)
        assert cursor.held <= MAX_HELD
        assert cursor.held_bytes <= max(MAX_HELD_BYTES, 0xFFFF)
        for item in cursor.take():
            before, tally = ingest.held.epoch, msgspec.structs.replace(ingest.profile.tally)
            batch = read_stock(item.payload, ingest.profile.identity.wants_tokens) if isinstance(item, Batch) else None
            ingest.apply(item, 1.0)
            if isinstance(item, Batch):
                _follow(recount, batch, ingest, before, tally)
            elif isinstance(item, GapLost | Restarted | RingReread) or (
                isinstance(item, Proven) and item.how == "next_seq"
            ):
                assert ingest.held.epoch != before, item
                recount.forget()
            recount.compare(ingest.held.blocks)
    downstream.flush(ingest, recount)
    downstream.ask(ingest)


def _say(cursor: Cursor, kind: int, step: Step) -> None:
    seq = step.seq & MAX_SEQ
    if kind == LIVE:
        cursor.live(seq, step.payload)
    elif kind == REPLAYED:
        cursor.replayed(seq, step.payload)
    elif kind == ENDED:
        cursor.replay_ended()
    elif kind == CONNECTED:
        cursor.connected()
    elif kind == DISCONNECTED:
        cursor.disconnected()
    elif kind == OVERDUE:
        cursor.replay_overdue()
    elif kind == FAILED:
        cursor.replay_failed("fuzzed")
    else:
        cursor.check()


def _follow(recount: Recount, batch: EventBatch | None, ingest: Ingest, epoch: str, before: IngestCounters) -> None:
    """Check the counters and the epoch after a batch, and apply the batch to the recount."""
    tally = ingest.profile.tally
    assert tally.batches == before.batches + 1
    if batch is None:
        assert tally.broken == before.broken + 1
        assert ingest.held.epoch != epoch, "an unreadable batch may have removed blocks"
        recount.forget()
        return
    assert tally.unknown == before.unknown + batch.unknown
    assert tally.broken == before.broken + len(batch.broken)
    if any(event.tag in (None, *REMOVING) for event in batch.broken):
        assert ingest.held.epoch != epoch, "an unreadable removal must void what is held"
        recount.forget()
        return
    assert ingest.held.epoch == epoch
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            recount.clear(event.medium, group_idx=event.group_idx)
        else:
            place = Place(event.group_idx, event.medium, event.ownership)
            stores = isinstance(event, BlockStored)
            beside = [other for other in recount.copies if other.medium == event.medium]
            stray = not stores and event.group_idx is None and beside and all(o.group_idx is not None for o in beside)
            for counted_place in beside if stray else [place]:
                recount.count(counted_place, event.block_hashes.tolist(), 1 if stores else -1)


def corpus() -> list[bytes]:
    """Return realistic stories.

    They have golden messages of vLLM, a life with every kind of event in each layout, a gap with its replay, and a
    restart.
    """
    stories = [
        [Step(CONNECTED), Step(ENDED), *(Step(LIVE, seq, payload) for seq, payload in enumerate(golden_batches()))]
    ]
    for layout, form in itertools.product(get_args(Layout), get_args(HashForm)):
        batches = [encode_batch(1.0, events, 0, layout=layout, hash_form=form) for events in _life()]
        live = [Step(LIVE, seq, payload) for seq, payload in enumerate(batches)]
        stories.append([Step(CONNECTED), Step(ENDED), *live[:3], Step(FLUSH), *live[3:]])
        replayed = [Step(REPLAYED, step.seq, step.payload) for step in live]
        stories.append([Step(CONNECTED), *replayed[:2], Step(ENDED), live[4], *replayed[1:4], Step(ENDED), live[5]])
        stories.append(
            [Step(CONNECTED), Step(ENDED), *live, Step(DISCONNECTED), Step(CONNECTED), *replayed[:2], live[0]]
        )
    return [pack(steps) for steps in stories]


def _life() -> list[list[Any]]:
    def stored(hashes: list[Any], parent: int | None, group: int | None = 0, **more: Any) -> WireStored:
        fields = {"medium": "GPU", "kv_cache_spec_kind": "full_attention"} | more
        size = fields.pop("block_size", 4)
        tokens = list(range(len(hashes) * size))
        return WireStored(hashes, parent, tokens, size, None, fields.pop("medium"), None, group_idx=group, **fields)

    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    return [
        [stored([1, 2, 3], None), stored([1, 2, 3], None, 1, **window), stored([2], 1)],
        [
            WireRemoved([1], "GPU", 0),
            WireRemoved([3], "GPU", 1),
            stored([9], 3, 2, kv_cache_spec_kind="mamba", block_size=8),
        ],
        [stored([1, 2], None, medium="CPU"), stored([3], 2, medium="FS", ownership="fs0", locality="REMOTE")],
        [
            stored([4], 3, extra_keys=[("salt",)], session_id="s"),
            WireRemoved([2, 2], "GPU", 0),
            stored([], None, medium="CPU"),
        ],
        [WireCleared("GPU"), stored([2**64 - 1, 2**63], None), stored([7], None, None, kv_cache_spec_kind=None)],
        [WireCleared(), stored([5, 6], None)],
    ]
