# SPDX-License-Identifier: Apache-2.0
"""The fuzz target for the engine patch's sockets: from frames through `ReportCursor` and `Ingest` to an answer.

No input may raise an exception. No block is credited between a loss and the snapshot that repairs it, and the held
blocks equal those of a slow recount.
"""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.decode import Unreadable, read_answer, read_report
from kvrouter.events.patch.items import HeartbeatSeen, Loaded, NewEpoch, ReportBatch, ReportGap, Snapshot
from kvrouter.events.patch.messages import (
    CatalogMessage,
    Events,
    Heartbeat,
    Hello,
    Reply,
    Report,
    ReportCleared,
    ReportEvent,
    ReportStored,
    SnapshotPart,
)
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.wire import MAX_SEQ
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import CREDITED, StreamState
from tests.fuzz.downstream import Copies, Downstream, Recount
from tests.fuzz.payload_target import golden_reports
from tests.fuzz.script import Step, pack, unpack
from tests.support.fake_reporter import Ledger, apply, parts, removed, stored, summary

LIVE, ANSWER, ASKED, CONNECTED, DISCONNECTED, OVERDUE, SILENT, FLUSH, KINDS = range(9)

MAX_HELD, MAX_HELD_BYTES, MAX_SNAPSHOT_BLOCKS = 6, 4_096, 64
REGISTRATION = Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1")
EPOCH = "e" * 16


def run(data: bytes) -> None:
    """Run one input; raises AssertionError, or the exception of the code under test."""
    cursor = ReportCursor(max_held=MAX_HELD, max_held_bytes=MAX_HELD_BYTES, max_snapshot_blocks=MAX_SNAPSHOT_BLOCKS)
    epochs = itertools.count()
    ingest = Ingest(REGISTRATION, seed=None, decoder=BatchDecoder(), new_epoch=lambda: f"{next(epochs):016x}")
    ingest.follow_reports()
    recount = Recount()
    downstream = Downstream(REGISTRATION)
    # `whole` is true from a snapshot to the next loss; `agreed` also ends when a heartbeat disagrees.
    whole = agreed = False
    for step in unpack(data):
        kind = step.kind % KINDS
        if kind == FLUSH:
            downstream.flush(ingest, recount)
            continue
        _say(cursor, kind, step)
        assert cursor.held <= MAX_HELD
        assert cursor.held_bytes <= max(MAX_HELD_BYTES, 0xFFFF)
        for item in cursor.take():
            assert whole or not isinstance(item, ReportBatch | HeartbeatSeen), "handed out before a snapshot"
            ingest.apply(item, 1.0)
            if isinstance(item, ReportBatch):
                _count(recount, item.message)
            elif isinstance(item, Loaded):
                whole = agreed = True
                recount.replace(_copies_of(item.snapshot))
            elif isinstance(item, NewEpoch | ReportGap):
                whole = agreed = False
                if isinstance(item, NewEpoch):
                    recount.forget()
            elif isinstance(item, HeartbeatSeen):
                agreed = _judge(item.message, ingest, recount)
                assert agreed or ingest.reports.wants_snapshot
            assert agreed or ingest.state not in CREDITED or not recount.blocks(), (
                "credited between a loss and a snapshot"
            )
            recount.compare(ingest.held.blocks)
        if ingest.reports.wants_snapshot:
            # The snapshot is requested only now, as in the stream: items that were handed out before are still applied.
            cursor.request_snapshot()
            ingest.reports.wants_snapshot = None
            whole = agreed = False
    downstream.flush(ingest, recount)
    downstream.ask(ingest)


def _say(cursor: ReportCursor, kind: int, step: Step) -> None:
    if kind == LIVE:
        _live(cursor, step)
    elif kind == ANSWER:
        reply = read_answer([b"", step.payload])
        if isinstance(reply, Unreadable):
            cursor.malformed(reply.reason)
            cursor.snapshot_failed(reply.reason)
        elif isinstance(reply, Hello):
            cursor.hello(reply)
        elif isinstance(reply, SnapshotPart):
            cursor.part(reply)
    elif kind == ASKED:
        cursor.on_request_sent()
    elif kind == CONNECTED:
        cursor.connected()
    elif kind == DISCONNECTED:
        cursor.disconnected()
    elif kind == OVERDUE:
        cursor.snapshot_overdue()
    else:
        cursor.silent(3.0)


def _live(cursor: ReportCursor, step: Step) -> None:
    seq, message = step.seq & MAX_SEQ, read_report(step.payload)
    if isinstance(message, Unreadable):
        cursor.malformed(message.reason)
        if message.uses_seq:
            cursor.unreadable(seq, message.epoch, len(step.payload))
    elif isinstance(message, Events):
        cursor.events(seq, message, len(step.payload))
    elif isinstance(message, Heartbeat):
        cursor.heartbeat(seq, message, len(step.payload))
    elif isinstance(message, CatalogMessage):
        cursor.catalog(seq, message)


def _count(recount: Recount, message: Events) -> None:
    for event in message.events:
        if isinstance(event, ReportCleared):
            recount.clear(event.medium, ownership=event.ownership)
            continue
        hashes = [int.from_bytes(event.hashes[at : at + 8], "big") for at in range(0, len(event.hashes), 8)]
        place = Place(event.group_idx, event.medium, event.ownership)
        recount.count(place, hashes, 1 if isinstance(event, ReportStored) else -1)


def _copies_of(snapshot: Snapshot) -> Copies:
    copies: Copies = {}
    for part in snapshot.places:
        several = dict(part.copied)
        held = copies.setdefault(Place(part.group_idx, part.medium, part.ownership), Counter())
        held.update({block_hash: several.get(block_hash, 1) for block_hash in part.hashes.tolist()})
    return copies


def _judge(beat: Heartbeat, ingest: Ingest, recount: Recount) -> bool:
    """Return whether the heartbeat agrees with the recount, and check that the worker's state shows it."""
    sums: dict[Place, tuple[int, int, int]] = {}
    mixed: set[Place] = set()
    for place_summary in beat.places:
        place = Place(place_summary.group_idx, place_summary.medium, place_summary.ownership)
        if place in sums:
            mixed.add(place)
        sums[place] = (place_summary.blocks, place_summary.copies, place_summary.digest)
    held, nothing = recount.sums(), (0, 0, 0)
    agrees = all(sums.get(place, nothing) == held.get(place, nothing) for place in {*sums, *held} - mixed)
    agreed_states = {StreamState.LIVE, StreamState.UNHASHABLE}
    if ingest.profile.contact.behind:
        # The batch was held behind a snapshot, and more may still follow.
        agreed_states = {StreamState.CATCHING_UP}
    assert agrees == (ingest.state in agreed_states), (agrees, ingest.state, ingest.reason)
    return agrees


def corpus() -> list[bytes]:
    """Return realistic stories.

    They have a life with snapshot, messages and heartbeats, a loss and its repair, a second life, and golden messages.
    """
    stories = [[*_life(EPOCH)], [*_life(EPOCH), *_life("f" * 16, request=2)], [*_life(EPOCH, lost=True)]]
    golden = [
        Step(LIVE if vector["side"] == "report" else ANSWER, vector.get("seq") or 0, bytes.fromhex(vector["payload"]))
        for vector in golden_reports()
    ]
    return [pack(steps) for steps in [*stories, golden, [*_life(EPOCH)[:8], *golden]]]


def _life(epoch: str, *, request: int = 1, lost: bool = False) -> list[Step]:
    ledger: Ledger = {}
    for number in range(6):
        apply(ledger, [stored(number + 1, group_idx=number % 2), stored(2, medium="CPU"), stored(7, 7)])

    def live(seq: int, message: Report) -> Step:
        return Step(LIVE, seq, msgspec.msgpack.encode(message))

    def answers(request: int, next_seq: int) -> list[Step]:
        snapshot_parts: list[Reply] = list(parts(ledger, request, epoch, next_seq, 8))
        return [Step(ASKED), *(Step(ANSWER, 0, msgspec.msgpack.encode(part)) for part in snapshot_parts)]

    def events(seq: int) -> Step:
        batch: list[ReportEvent] = [
            stored(seq + 20, 21, group_idx=1),
            removed(2, medium="CPU"),
            removed(7),
            ReportCleared("STORAGE"),
        ]
        apply(ledger, batch)
        return live(seq, Events(epoch, 1.0, 2.0, batch))

    def beat(seq: int) -> Step:
        return live(seq, Heartbeat(epoch, 1.0, 2.0, 1.0, summary(ledger), 1))

    steps = [Step(ANSWER, 0, msgspec.msgpack.encode(Hello(1, epoch, 1.0, 5, "tcp://127.0.0.1:3", 1.0)))]
    steps += [Step(CONNECTED), *answers(request, 5), events(5), beat(6), Step(FLUSH), events(6)]
    if lost:
        events(7)
        steps += [events(8), *answers(request + 1, 9)]
    return [*steps, beat(9 if lost else 7), Step(SILENT), Step(DISCONNECTED)]
