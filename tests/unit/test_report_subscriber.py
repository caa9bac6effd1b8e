# SPDX-License-Identifier: Apache-2.0
"""The report subscriber over real sockets, on both event loops: joining, gaps, lives, silence.

Each decision by itself is the subject of test_report_cursor.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from kvrouter.events.patch.items import (
    Declared,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    ReportResume,
)
from kvrouter.events.patch.messages import DeclaredCatalog, HelloRequest, SnapshotRequest
from kvrouter.events.vllm.stream_items import Connected, Disconnected
from tests.support.fake_reporter import HOST, Context, FakeReporter, apply, stored
from tests.support.report_stream import MOVED, eventually, kinds, only, read, seqs


async def test_a_late_reader_loads_a_snapshot_and_follows(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        reporter.publish(stored(1, 2, 2))
        reporter.publish(stored(7, medium="CPU"))
        reporter.declare(DeclaredCatalog([], align=64))
        async with read(reporter, context) as stream:
            items = await stream.until_kind(Loaded)
            assert kinds(items) == ["Greeted", "Declared", "Connected", "Loaded", "CaughtUp"]
            assert stream.ledger == reporter.ledger
            last = reporter.publish(stored(3))
            items = await stream.until_kind(ReportBatch)
            assert seqs(items) == [last]
            await stream.until_proven(reporter)
            assert reporter.asked(SnapshotRequest) == 1


async def test_a_lost_message_is_a_gap_that_a_snapshot_heals(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        reporter.publish(stored(1), lost=True)
        seq = reporter.publish(stored(2), dropped=1)
        items = await stream.until_kind(Loaded)
        assert items[0] == ReportGap(seq - 1, seq, 1, f"seq {seq} came next")
        await stream.until_proven(reporter)


async def test_a_heartbeat_reveals_a_lost_last_message(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        reporter.publish(stored(1), lost=True)
        reporter.beat()
        assert only(await stream.until_kind(Loaded), ReportGap) == ["ReportGap"]
        await stream.until_proven(reporter)


async def test_a_valid_resume_needs_no_snapshot(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        reporter.publish(stored(1))
        resume = ReportResume(reporter.epoch, reporter.next_seq)
        async with read(reporter, context, resume=resume) as stream:
            stream.ledger = {}
            apply(stream.ledger, [stored(1)])
            await stream.until_kind(Connected)
            assert only(await stream.until_proven(reporter), Loaded, ReportGap, NewEpoch) == []
            reporter.publish(stored(2))
            await stream.until_proven(reporter)
            assert reporter.asked(SnapshotRequest) == 0


@pytest.mark.parametrize(("epoch", "announced"), [("a" * 16, "ReportGap"), ("b" * 16, "NewEpoch")])
async def test_an_outdated_resume_takes_a_snapshot(context: Context, epoch: str, announced: str) -> None:
    async with FakeReporter(context) as reporter:
        reporter.publish(stored(1))
        async with read(reporter, context, resume=ReportResume(epoch, 0)) as stream:
            assert only(await stream.until_kind(Loaded), ReportGap, NewEpoch) == [announced]
            await stream.until_proven(reporter)


@pytest.mark.parametrize("same_reports", [True, False])
async def test_a_restarted_publisher_is_a_new_epoch(context: Context, same_reports: bool) -> None:
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
            assert only(await stream.until_kind(Loaded), NewEpoch) == ["NewEpoch"]
            await stream.until_proven(successor)


async def test_a_new_epoch_on_open_connections_takes_a_snapshot(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        greeted = reporter.asked(HelloRequest)
        reporter.begin_life("b" * 16)
        reporter.publish(stored(5))
        assert only(await stream.until_kind(Loaded), NewEpoch, Disconnected) == ["NewEpoch"]
        await stream.until_proven(reporter)
        await eventually(lambda: reporter.asked(HelloRequest) > greeted)


async def test_a_silent_publisher_is_greeted_until_it_is_heard_again(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        reporter.heartbeat_s = 0.02
        async with read(reporter, context) as stream:
            loaded = await stream.until_kind(Loaded)
            # On a busy machine it is silent before everything is loaded.
            if not any(isinstance(item, PatchSilent) for item in loaded):
                await stream.until_kind(PatchSilent)
            greeted = reporter.asked(HelloRequest)
            # The subscriber requests hellos again and again.
            await eventually(lambda: reporter.asked(HelloRequest) > greeted + 1)
            reporter.beat()
            items = await stream.until_kind(HeartbeatSeen)
            assert only(items, PatchHeard, PatchSilent, HeartbeatSeen) == ["PatchHeard", "HeartbeatSeen"]


async def test_after_our_own_stall_messages_get_time_to_arrive(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        reporter.heartbeat_s = 0.02
        async with read(reporter, context, grace_s=0.3) as stream:
            await stream.until_kind(Loaded)
            reporter.beat()
            await stream.until_kind(HeartbeatSeen)
            # Nothing waits when the loop goes on, because messages that were sent in time come a moment later.
            time.sleep(0.5)  # noqa: ASYNC251 - that is the stall
            asyncio.get_running_loop().call_later(0.01, reporter.beat)
            assert only(await stream.until_kind(HeartbeatSeen), PatchSilent) == []
            assert only(await stream.until_kind(PatchSilent), PatchSilent) == ["PatchSilent"]


async def test_a_silent_publisher_is_followed_to_its_new_endpoint(context: Context) -> None:
    reporter, elsewhere = FakeReporter(context), FakeReporter(context)
    async with reporter, elsewhere:
        reporter.heartbeat_s = 0.02
        async with read(reporter, context) as stream:
            # On a busy machine, the silence may be announced during the snapshot.
            items = await stream.until_kind(Loaded)
            reporter.reports_said = elsewhere.reports_endpoint
            items += await stream.until(lambda came: only(came, Disconnected, Connected)[-2:] == MOVED)
            assert "PatchSilent" in only(items, PatchSilent)
            assert only(await stream.until_proven(elsewhere), PatchHeard) == ["PatchHeard"]


async def test_the_publisher_announces_its_heartbeat_interval(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context, heartbeat_s=0.1) as stream:
        await stream.until_kind(Loaded)
        # The pause is well beyond three intervals of the value that was assumed before the publisher answered.
        await asyncio.sleep(0.8)
        reporter.beat()
        assert only(await stream.until_kind(HeartbeatSeen), PatchSilent, PatchHeard) == []


# With much grace, only the order counts: waiting messages are read before silence is judged.
@pytest.mark.parametrize("grace_s", [0.1, 60.0])
async def test_our_own_stall_is_not_the_publishers_silence(context: Context, grace_s: float) -> None:
    async with FakeReporter(context) as reporter:
        reporter.heartbeat_s = 0.02
        async with read(reporter, context, grace_s=grace_s) as stream:
            await stream.until_kind(Loaded)
            reporter.beat()
            await stream.until_kind(HeartbeatSeen)
            reporter.beat()
            # The loop stands still for much longer than the limit of silence, with a message waiting.
            time.sleep(0.3)  # noqa: ASYNC251 - that is the stall
            assert only(await stream.until_kind(HeartbeatSeen), PatchSilent) == []


async def test_an_absent_publisher_is_silent_until_it_starts(context: Context) -> None:
    free = FakeReporter(context)
    await free.close()
    async with read(free.requests_endpoint, context, heartbeat_s=0.02) as stream:
        await stream.until_kind(PatchSilent)
        async with FakeReporter(context, requests=free.requests_endpoint) as reporter:
            items = await stream.until_kind(Loaded)
            assert kinds(items)[0] == "Greeted"
            items = await stream.until_proven(reporter)
            assert kinds(items)[0] == "PatchHeard"


async def test_an_unanswered_greeting_is_repeated(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        reporter.mute = True
        async with read(reporter, context, answer_timeout_s=0.05) as stream:
            await eventually(lambda: reporter.asked(HelloRequest) == 2)
            reporter.mute = False
            await stream.until_kind(Loaded)


async def test_a_lost_catalog_is_requested(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        reporter.declare(DeclaredCatalog([], align=1))
        assert kinds(await stream.until_kind(Declared)) == ["Declared"]
        reporter.declare(DeclaredCatalog([], align=2), lost=True)
        reporter.beat()
        items = await stream.until_kind(Declared)
        assert kinds(items) == ["HeartbeatSeen", "Greeted", "Declared"]
        assert items[-1] == Declared(2, DeclaredCatalog([], align=2))
