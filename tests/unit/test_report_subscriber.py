# SPDX-License-Identifier: Apache-2.0
"""The report subscriber over real sockets, on both event loops. What is judged how is test_report_cursor.py's
subject."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from fake_reporter import HOST, Context, FakeReporter, Ledger, apply, refused, stored

from kvrouter.events.patch.hello import greet
from kvrouter.events.patch.items import (
    Declared,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    ReportItem,
    ReportResume,
    SnapshotFailed,
)
from kvrouter.events.patch.messages import (
    REPORT_TOPIC,
    DeclaredCatalog,
    HelloRequest,
    Refused,
    SnapshotPart,
    SnapshotRequest,
)
from kvrouter.events.patch.settings import ReportSettings
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.subscription import SubscriberClosed
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Malformed

# Nothing here waits this long unless it fails.
PATIENCE_S = 15.0
QUICK: dict[str, Any] = {
    "settle_s": 0.02,
    "greeting_pause_s": 0.005,
    "snapshot_pause_s": 0.005,
    "silent_greeting_s": 0.02,
    "reconnect_min_s": 0.01,
    "reconnect_max_s": 0.05,
}


class Stream:
    """A started subscriber, what it said so far, and the ledger that this makes."""

    def __init__(self, subscriber: ReportSubscriber) -> None:
        self.subscriber = subscriber
        self.items: list[ReportItem] = []
        self.ledger: Ledger | None = None

    async def __aenter__(self) -> Stream:
        await self.subscriber.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.close()

    async def take(self) -> None:
        for item in await self.subscriber.next():
            self.items.append(item)
            match item:
                case Loaded(snapshot):
                    self.ledger = {}
                    for place in snapshot.places:
                        hashes = place.hashes.tolist()
                        extra = [one for one, copies in place.copied for _ in range(copies - 1)]
                        apply(self.ledger, [stored(*hashes, *extra, medium=place.medium)])
                case ReportBatch(_, message):
                    assert self.ledger is not None, "a batch without a state to apply it to"
                    apply(self.ledger, message.events)
                case ReportGap() | NewEpoch():
                    self.ledger = None

    async def until(self, enough: Callable[[list[ReportItem]], object]) -> list[ReportItem]:
        """The items up to where `enough` holds of all that came; they are taken."""
        while not enough(self.items):
            await self.take()
        items, self.items = self.items, []
        return items

    async def until_kind(self, kind: type[ReportItem], count: int = 1) -> list[ReportItem]:
        return await self.until(lambda items: sum(isinstance(item, kind) for item in items) >= count)

    async def until_proven(self, reporter: FakeReporter) -> list[ReportItem]:
        """Beats until one is handed out, and compares: the reader has all."""
        came: list[ReportItem] = []
        while not any(isinstance(item, HeartbeatSeen) and item.next_seq == reporter.next_seq for item in came):
            reporter.beat()
            try:
                came += await asyncio.wait_for(self.until_kind(HeartbeatSeen), 0.05)
            except TimeoutError:
                continue
        assert self.ledger == reporter.ledger
        return came


def kinds(items: list[ReportItem]) -> list[str]:
    return [type(item).__name__ for item in items]


def only(items: list[ReportItem], *wanted: type[ReportItem]) -> list[str]:
    return [type(item).__name__ for item in items if isinstance(item, wanted)]


MOVED = ["Disconnected", "Connected"]


def seqs(items: list[ReportItem]) -> list[int]:
    return [item.seq for item in items if isinstance(item, ReportBatch)]


def read(
    reporter: FakeReporter | str,
    context: Context,
    *,
    resume: ReportResume | None = None,
    permits: Permits | None = None,
    **options: Any,
) -> Stream:
    endpoint = reporter if isinstance(reporter, str) else reporter.requests_endpoint
    settings = ReportSettings(**(QUICK | options))
    return Stream(ReportSubscriber(endpoint, context=context, resume=resume, settings=settings, permits=permits))


async def eventually(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


def test_joins_late_and_follows(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.publish(stored(1, 2, 2))
            reporter.publish(stored(7, medium="CPU"))
            reporter.declare(DeclaredCatalog([], align=64))
            async with read(reporter, context) as stream:
                items = await stream.until_kind(Loaded)
                assert kinds(items) == ["Greeted", "Declared", "Connected", "Loaded"]
                assert stream.ledger == reporter.ledger
                last = reporter.publish(stored(3))
                items = await stream.until_kind(ReportBatch)
                assert seqs(items) == [last]
                await stream.until_proven(reporter)
                assert reporter.asked(SnapshotRequest) == 1

    run(test())


def test_no_more_snapshots_at_once_than_are_permitted(context: Context, run: Any) -> None:
    async def test() -> None:
        permits = Permits(rng=Random(1), at_once=1)
        first = permits.ask(lambda: None)
        async with FakeReporter(context) as reporter:
            reporter.publish(stored(1))
            async with read(reporter, context, permits=permits) as stream:
                await eventually(lambda: permits.waiting)
                assert reporter.asked(SnapshotRequest) == 0
                first.end()
                await stream.until_kind(Loaded)
                # The answer ended its permit: another is granted at once.
                await eventually(lambda: permits.ask(lambda: None).granted)

    run(test())


def test_publishing_goes_on_meanwhile(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:

            def busy(request: SnapshotRequest) -> list[Any]:
                # Frozen first; then messages overtake the answer.
                answer = reporter.honest(request)
                for number in range(50):
                    reporter.publish(stored(number))
                return answer

            reporter.snapshot_script.append(busy)
            async with read(reporter, context) as stream:
                items = await stream.until(lambda items: 49 in seqs(items))
                assert seqs(items) == list(range(50))
                await stream.until_proven(reporter)

    run(test())


def test_lost_message_is_a_gap_and_healed(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            reporter.publish(stored(1), lost=True)
            seq = reporter.publish(stored(2), dropped=1)
            items = await stream.until_kind(Loaded)
            assert items[0] == ReportGap(seq - 1, seq, 1, f"seq {seq} came next")
            await stream.until_proven(reporter)

    run(test())


def test_heartbeat_shows_a_lost_tail(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            reporter.publish(stored(1), lost=True)
            reporter.beat()
            assert only(await stream.until_kind(Loaded), ReportGap) == ["ReportGap"]
            await stream.until_proven(reporter)

    run(test())


def test_consumer_doubts(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            stream.subscriber.ask_snapshot("digest differs")
            assert kinds(await stream.until_kind(Loaded)) == ["Loaded"]
            await stream.until_proven(reporter)
            assert reporter.asked(SnapshotRequest) == 2

    run(test())


def test_resumes_without_a_snapshot(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.publish(stored(1))
            resume = ReportResume(reporter.epoch, reporter.next_seq)
            async with read(reporter, context, resume=resume) as stream:
                stream.ledger = {}
                apply(stream.ledger, [stored(1)])
                await stream.until_kind(Connected)
                items = await stream.until_proven(reporter)
                assert only(items, Loaded, ReportGap, NewEpoch) == []
                reporter.publish(stored(2))
                await stream.until_proven(reporter)
                assert reporter.asked(SnapshotRequest) == 0

    run(test())


@pytest.mark.parametrize(("epoch", "told"), [("a" * 16, "ReportGap"), ("b" * 16, "NewEpoch")])
def test_resume_that_does_not_hold(context: Context, run: Any, epoch: str, told: str) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.publish(stored(1))
            async with read(reporter, context, resume=ReportResume(epoch, 0)) as stream:
                items = await stream.until_kind(Loaded)
                assert only(items, ReportGap, NewEpoch) == [told]
                await stream.until_proven(reporter)

    run(test())


@pytest.mark.parametrize("same_reports", [True, False])
def test_restart_on_the_same_requests_endpoint(context: Context, run: Any, same_reports: bool) -> None:
    async def test() -> None:
        reporter = FakeReporter(context)
        async with reporter, read(reporter, context) as stream:
            reporter.publish(stored(1))
            await stream.until_kind(Loaded)
            await reporter.close()
            await stream.until_kind(Disconnected)
            reports = reporter.reports_endpoint if same_reports else f"{HOST}:*"
            async with FakeReporter(
                context, epoch="b" * 16, requests=reporter.requests_endpoint, reports=reports
            ) as successor:
                successor.publish(stored(5))
                items = await stream.until_kind(Loaded)
                assert only(items, NewEpoch) == ["NewEpoch"]
                await stream.until_proven(successor)

    run(test())


def test_new_epoch_on_living_sockets(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            greeted = reporter.asked(HelloRequest)
            reporter.begin_life("b" * 16)
            reporter.publish(stored(5))
            items = await stream.until_kind(Loaded)
            assert only(items, NewEpoch, Disconnected) == ["NewEpoch"]
            await stream.until_proven(reporter)
            await eventually(lambda: reporter.asked(HelloRequest) > greeted)

    run(test())


def test_silent_and_heard_again(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.heartbeat_s = 0.02
            async with read(reporter, context) as stream:
                await stream.until_kind(Loaded)
                await stream.until_kind(PatchSilent)
                greeted = reporter.asked(HelloRequest)
                # It is asked where it is, again and again.
                await eventually(lambda: reporter.asked(HelloRequest) > greeted + 1)
                reporter.beat()
                items = await stream.until_kind(HeartbeatSeen)
                assert only(items, PatchHeard, PatchSilent, HeartbeatSeen) == ["PatchHeard", "HeartbeatSeen"]

    run(test())


def test_what_came_too_late_for_us_to_judge_gets_its_time(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.heartbeat_s = 0.02
            async with read(reporter, context, grace_s=0.3) as stream:
                await stream.until_kind(Loaded)
                reporter.beat()
                await stream.until_kind(HeartbeatSeen)
                # Nothing waits when the loop goes on: what was sent in time comes a moment later.
                time.sleep(0.5)  # noqa: ASYNC251 - that is the stall
                asyncio.get_running_loop().call_later(0.01, reporter.beat)
                items = await stream.until_kind(HeartbeatSeen)
                assert only(items, PatchSilent) == []
                assert only(await stream.until_kind(PatchSilent), PatchSilent) == ["PatchSilent"]

    run(test())


def test_silent_publisher_is_found_where_it_went(context: Context, run: Any) -> None:
    async def test() -> None:
        reporter, elsewhere = FakeReporter(context), FakeReporter(context)
        async with reporter, elsewhere:
            reporter.heartbeat_s = 0.02
            async with read(reporter, context) as stream:
                # On a busy machine the silence may be told while the snapshot is on its way.
                items = await stream.until_kind(Loaded)
                reporter.reports_said = elsewhere.reports_endpoint
                items += await stream.until(lambda came: only(came, Disconnected, Connected)[-2:] == MOVED)
                assert "PatchSilent" in only(items, PatchSilent)
                assert only(await stream.until_proven(elsewhere), PatchHeard) == ["PatchHeard"]

    run(test())


def test_publisher_says_how_often_it_is_heard(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context, heartbeat_s=0.02) as stream:
            await stream.until_kind(Loaded)
            # Well beyond three intervals of what was assumed before it answered.
            await asyncio.sleep(0.2)
            reporter.beat()
            assert only(await stream.until_kind(HeartbeatSeen), PatchSilent, PatchHeard) == []

    run(test())


# With much grace only the order counts: what waits is read before silence is judged.
@pytest.mark.parametrize("grace_s", [0.1, 60.0])
def test_own_stall_is_nobodys_silence(context: Context, run: Any, grace_s: float) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.heartbeat_s = 0.02
            async with read(reporter, context, grace_s=grace_s) as stream:
                await stream.until_kind(Loaded)
                reporter.beat()
                await stream.until_kind(HeartbeatSeen)
                reporter.beat()
                # The loop stands still for much longer than silence takes, with a message waiting.
                time.sleep(0.3)  # noqa: ASYNC251 - that is the stall
                items = await stream.until_kind(HeartbeatSeen)
                assert only(items, PatchSilent) == []

    run(test())


def test_nobody_there_is_silent_until_somebody_is(context: Context, run: Any) -> None:
    async def test() -> None:
        free = FakeReporter(context)
        await free.close()
        async with read(free.requests_endpoint, context, heartbeat_s=0.02) as stream:
            await stream.until_kind(PatchSilent)
            async with FakeReporter(context, requests=free.requests_endpoint) as reporter:
                items = await stream.until_kind(Loaded)
                assert kinds(items)[0] == "Greeted"
                items = await stream.until_proven(reporter)
                assert kinds(items)[0] == "PatchHeard"

    run(test())


def test_greeting_is_sent_again_when_not_answered(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.mute = True
            async with read(reporter, context, answer_timeout_s=0.05) as stream:
                await eventually(lambda: reporter.asked(HelloRequest) == 2)
                reporter.mute = False
                await stream.until_kind(Loaded)

    run(test())


def test_lost_declaration_is_asked_for(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            reporter.declare(DeclaredCatalog([], align=1))
            assert kinds(await stream.until_kind(Declared)) == ["Declared"]
            reporter.declare(DeclaredCatalog([], align=2), lost=True)
            reporter.beat()
            items = await stream.until_kind(Declared)
            assert kinds(items) == ["HeartbeatSeen", "Greeted", "Declared"]
            assert items[-1] == Declared(2, DeclaredCatalog([], align=2))

    run(test())


def without(index: int) -> Callable[[list[Any]], list[Any]]:
    return lambda parts: parts[:index] + parts[index + 1 :]


def with_part(at: int, /, **change: Any) -> Callable[[list[Any]], list[Any]]:
    def changed(parts: list[Any]) -> list[Any]:
        parts[at] = msgspec.structs.replace(parts[at], **change)
        return parts

    return changed


@pytest.mark.parametrize(
    "fault",
    [
        without(0),
        without(1),
        with_part(1, epoch="b" * 16),
        with_part(1, index=2**63),
        with_part(0, hashes=b"123"),
        with_part(0, id=12345),
        with_part(-1, next_seq=77),
        lambda parts: [b"\xc1"],
        lambda parts: [*parts[:1], msgspec.msgpack.encode({"type": "snapshot"})],
    ],
)
def test_snapshot_that_cannot_be_used_is_asked_for_again(context: Context, run: Any, fault: Any) -> None:
    healed_after(fault, context, run, answer_timeout_s=60.0)


@pytest.mark.parametrize("fault", [without(-1), lambda parts: []])
def test_snapshot_that_does_not_come_is_asked_for_again(context: Context, run: Any, fault: Any) -> None:
    healed_after(fault, context, run, answer_timeout_s=0.05)


def healed_after(fault: Any, context: Context, run: Any, **options: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.publish(stored(1, 2, 3, 3))
            reporter.snapshot_script.append(lambda request: fault(reporter.honest(request)))
            async with read(reporter, context, **options) as stream:
                items = await stream.until_kind(Loaded)
                assert "SnapshotFailed" in only(items, SnapshotFailed, Loaded)
                await stream.until_proven(reporter)

    run(test())


def test_unknown_answers_are_skipped(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            later = msgspec.msgpack.encode({"type": "later"})
            reporter.snapshot_script.append(
                lambda request: [later, Refused(request.id + 1, "another's"), *reporter.honest(request)]
            )
            async with read(reporter, context) as stream:
                items = await stream.until_kind(Loaded)
                assert only(items, SnapshotFailed, Malformed) == []

    run(test())


@pytest.mark.parametrize("retry_s", [0.01, None, float("nan"), float("inf"), 1e9, -1.0])
def test_refusal_is_waited_out(context: Context, run: Any, retry_s: float | None) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.snapshot_script.append(refused(retry_s))
            async with read(reporter, context, max_snapshot_pause_s=0.05) as stream:
                items = await stream.until_kind(Loaded)
                assert [item for item in items if isinstance(item, SnapshotFailed)] == [SnapshotFailed("refused: busy")]

    run(test())


def test_long_refusal_leaves_the_publisher_alone(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.snapshot_script.append(refused(20.0))
            async with read(reporter, context) as stream:
                await stream.until_kind(SnapshotFailed)
                for _ in range(20):
                    reporter.publish(stored(1))
                    await asyncio.sleep(0.005)
                assert reporter.asked(SnapshotRequest) == 1
                assert stream.subscriber.held == 0

    run(test())


def test_garbage_is_told_and_costs_only_itself(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            seq = bytes(8)
            for frames in (
                [REPORT_TOPIC],
                [REPORT_TOPIC, seq],
                [REPORT_TOPIC, seq, b"", b""],
                [REPORT_TOPIC, b"short", b""],
                [REPORT_TOPIC, b"\xff" * 8, b""],
                [REPORT_TOPIC, seq, b"\xc1"],
                [REPORT_TOPIC, seq, b"\x91" * 5_000],
            ):
                reporter.send_raw(*frames)
            items = await stream.until_kind(Malformed, 7)
            assert kinds(items) == ["Malformed"] * 7
            assert stream.subscriber.malformed == 7
            reporter.publish(stored(1))
            assert only(await stream.until_proven(reporter), ReportGap) == []

    run(test())


def test_what_is_not_for_us_is_skipped(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            # A topic that begins like ours, and a type of a later version.
            reporter.send_raw(REPORT_TOPIC + b"0", bytes(8), b"\xc1")
            reporter.send_raw(REPORT_TOPIC, bytes(8), msgspec.msgpack.encode({"type": "later"}))
            reporter.publish(stored(1))
            assert kinds(await stream.until_kind(ReportBatch)) == ["ReportBatch"]

    run(test())


def test_unreadable_events_are_a_gap(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)
            seq = reporter.publish(stored(1), lost=True)
            reporter.send_raw(
                REPORT_TOPIC,
                seq.to_bytes(8, "big"),
                msgspec.msgpack.encode({"type": "events", "epoch": reporter.epoch}),
            )
            items = await stream.until_kind(Loaded)
            assert kinds(items) == ["Malformed", "ReportGap", "Loaded"]
            await stream.until_proven(reporter)

    run(test())


@pytest.mark.parametrize("reports", ["ipc:///etc/passwd", "nonsense", "tcp://127.0.0.1:0", "tcp://bad host:5"])
def test_hello_that_names_no_endpoint(context: Context, run: Any, reports: str) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            reporter.heartbeat_s = 0.02
            reporter.reports_said = reports
            async with read(reporter, context) as stream:
                await stream.until_kind(Malformed)
                reporter.reports_said = None
                await stream.until_kind(Loaded)

    run(test())


def test_wildcard_host_is_the_one_asked(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            port = reporter.reports_endpoint.rpartition(":")[2]
            reporter.reports_said = f"tcp://0.0.0.0:{port}"
            async with read(reporter, context) as stream:
                await stream.until_kind(Loaded)

    run(test())


def test_full_consumer_stops_the_reading(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context, max_waiting=8, turn_messages=4) as stream:
            await stream.until_kind(Loaded)
            for number in range(200):
                reporter.publish(stored(number))
            await eventually(lambda: stream.subscriber.waiting >= 8)
            await asyncio.sleep(0.05)
            assert stream.subscriber.waiting < 8 + 4
            assert seqs(await stream.until_kind(ReportBatch, 200)) == list(range(200))
            await stream.until_proven(reporter)

    run(test())


def test_full_by_bytes(context: Context, run: Any) -> None:
    async def test() -> None:
        async with (
            FakeReporter(context) as reporter,
            read(reporter, context, max_waiting_bytes=4_000, turn_messages=4) as stream,
        ):
            await stream.until_kind(Loaded)
            for _ in range(50):
                reporter.publish(stored(*range(200)))
            await eventually(lambda: stream.subscriber.waiting >= 3)
            await asyncio.sleep(0.05)
            assert stream.subscriber.waiting < 3 + 4
            assert seqs(await stream.until_kind(ReportBatch, 50)) == list(range(50))

    run(test())


def test_inproc(context: Context, run: Any) -> None:
    async def test() -> None:
        async with (
            FakeReporter(context, requests="inproc://q", reports="inproc://r") as reporter,
            read(reporter, context) as stream,
        ):
            assert kinds(await stream.until_kind(Loaded)) == ["Greeted", "Connected", "Loaded"]
            reporter.publish(stored(1))
            await stream.until_proven(reporter)

    run(test())


def test_probe(context: Context, run: Any) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter:
            hello = await greet(reporter.requests_endpoint, context=context, timeout_s=PATIENCE_S)
            assert hello is not None
            assert (hello.epoch, hello.reports) == (reporter.epoch, reporter.reports_endpoint)
            reporter.mute = True
            assert await greet(reporter.requests_endpoint, context=context, timeout_s=0.05) is None
        assert await greet(reporter.requests_endpoint, context=context, timeout_s=0.05) is None
        with pytest.raises(zmq.ZMQError):
            await greet("nonsense", context=context, timeout_s=1)
        task = asyncio.create_task(greet(reporter.requests_endpoint, context=context, timeout_s=60))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test())


def test_probe_survives_a_flood_of_nonsense(context: Context, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        flood = itertools.cycle([[b"", b"\xc1"], [b""], [b"", msgspec.msgpack.encode(SnapshotPart(1, "e", 1.0, 0, 0))]])
        monkeypatch.setattr("kvrouter.events.transport.link.Link.receive", lambda _: next(flood))
        assert await greet(f"{HOST}:9", context=context, timeout_s=0.05) is None

    run(test())


def test_full_consumer_leaves_the_loop_alone(context: Context, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context, max_waiting=1) as stream:
            await stream.until_kind(Loaded)
            reporter.publish(stored(1))
            await eventually(lambda: stream.subscriber.waiting == 1)
            # Everything was read: the next message wakes the descriptor.
            reporter.publish(stored(2))
            await asyncio.sleep(0.05)
            turns = 0
            run_turn = ReportSubscriber._run_turn

            def counted(self: ReportSubscriber) -> None:
                nonlocal turns
                turns += 1
                run_turn(self)

            monkeypatch.setattr(ReportSubscriber, "_run_turn", counted)
            for _ in range(100):
                await asyncio.sleep(0)
            assert turns < 10
            assert seqs(await stream.until_kind(ReportBatch, 2)) == [0, 1]

    run(test())


def test_life_of_a_subscriber(context: Context, run: Any) -> None:
    async def test() -> None:
        bad = ReportSubscriber("nonsense", context=context)
        with pytest.raises(zmq.ZMQError):
            await bad.start()
        with pytest.raises(SubscriberClosed):
            await bad.next()
        async with FakeReporter(context) as reporter:
            subscriber = ReportSubscriber(reporter.requests_endpoint, context=context)
            await subscriber.start()
            with pytest.raises(RuntimeError):
                await subscriber.start()
            assert isinstance((await subscriber.next())[0], Greeted)
            stream = Stream(subscriber)
            await stream.until_kind(Loaded)
            waiting = asyncio.create_task(subscriber.next())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError):
                await subscriber.next()
            waiting.cancel()
            await asyncio.sleep(0)
            reporter.publish(stored(1))
            assert seqs(await subscriber.next()) == [0]
            waiting = asyncio.create_task(subscriber.next())
            await asyncio.sleep(0)
            await subscriber.close()
            await subscriber.close()
            with pytest.raises(SubscriberClosed):
                await waiting
            with pytest.raises(SubscriberClosed):
                await subscriber.start()
            subscriber.ask_snapshot("closed")

    run(test())


def test_sockets_that_cannot_go_on_are_told(context: Context, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with FakeReporter(context) as reporter, read(reporter, context) as stream:
            await stream.until_kind(Loaded)

            def broken(*_: object) -> None:
                raise zmq.ZMQError(zmq.ETERM)

            monkeypatch.setattr("kvrouter.events.transport.link.Link.receive", broken)
            reporter.beat()
            with pytest.raises(zmq.ZMQError):
                await stream.until_kind(HeartbeatSeen)

    run(test())
