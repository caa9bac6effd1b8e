# SPDX-License-Identifier: Apache-2.0
"""Garbage, full consumers, and the start and end of the report subscriber, over real sockets."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
import zmq

from kvrouter.events.patch.hello import greet
from kvrouter.events.patch.items import Greeted, HeartbeatSeen, Loaded, ReportBatch, ReportGap
from kvrouter.events.patch.messages import REPORT_TOPIC, SnapshotPart
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.subscription import SubscriberClosed
from kvrouter.events.vllm.stream_items import Malformed
from tests.support.fake_reporter import HOST, Context, FakeReporter, stored
from tests.support.ports import free_port
from tests.support.report_stream import PATIENCE_S, Stream, eventually, kinds, only, read, seqs


async def test_garbage_is_reported_and_costs_only_itself(context: Context) -> None:
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
        assert kinds(await stream.until_kind(Malformed, 7)) == ["Malformed"] * 7
        reporter.publish(stored(1))
        assert only(await stream.until_proven(reporter), ReportGap) == []


async def test_other_topics_and_unknown_types_are_skipped(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        # Send a topic that begins like ours, and a type of a later version.
        reporter.send_raw(REPORT_TOPIC + b"0", bytes(8), b"\xc1")
        reporter.send_raw(REPORT_TOPIC, bytes(8), msgspec.msgpack.encode({"type": "later"}))
        reporter.publish(stored(1))
        assert kinds(await stream.until_kind(ReportBatch)) == ["ReportBatch"]


async def test_an_unreadable_events_message_is_a_gap(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        seq = reporter.publish(stored(1), lost=True)
        reporter.send_raw(
            REPORT_TOPIC,
            seq.to_bytes(8, "big"),
            msgspec.msgpack.encode({"type": "events", "epoch": reporter.epoch}),
        )
        items = await stream.until_kind(Loaded)
        assert kinds(items) == ["Malformed", "ReportGap", "FellBehind", "Loaded", "CaughtUp"]
        await stream.until_proven(reporter)


@pytest.mark.parametrize("reports", ["ipc:///etc/passwd", "nonsense", "tcp://127.0.0.1:0", "tcp://bad host:5"])
async def test_a_hello_without_a_usable_endpoint_is_malformed(context: Context, reports: str) -> None:
    async with FakeReporter(context) as reporter:
        reporter.heartbeat_s = 0.02
        reporter.reports_said = reports
        async with read(reporter, context) as stream:
            await stream.until_kind(Malformed)
            reporter.reports_said = None
            await stream.until_kind(Loaded)


async def test_a_wildcard_host_means_the_host_of_the_requests_endpoint(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        port = reporter.reports_endpoint.rpartition(":")[2]
        reporter.reports_said = f"tcp://0.0.0.0:{port}"
        async with read(reporter, context) as stream:
            await stream.until_kind(Loaded)


async def test_no_more_is_read_while_the_consumer_is_full(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context, max_waiting=8, turn_messages=4) as stream:
        await stream.until_kind(Loaded)
        for number in range(200):
            reporter.publish(stored(number))
        await eventually(lambda: stream.subscriber.waiting >= 8)
        await asyncio.sleep(0.05)
        assert stream.subscriber.waiting < 8 + 4
        assert seqs(await stream.until_kind(ReportBatch, 200)) == list(range(200))
        await stream.until_proven(reporter)


async def test_waiting_report_bytes_are_bounded(context: Context) -> None:
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


async def test_inproc_endpoints_are_followed(context: Context) -> None:
    async with (
        FakeReporter(context, requests="inproc://q", reports="inproc://r") as reporter,
        read(reporter, context) as stream,
    ):
        assert kinds(await stream.until_kind(Loaded)) == ["Greeted", "Connected", "Loaded", "CaughtUp"]
        reporter.publish(stored(1))
        await stream.until_proven(reporter)


async def test_greet_returns_the_hello_or_none_in_time(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        hello = await greet(reporter.requests_endpoint, context=context, timeout_s=PATIENCE_S)
        assert hello is not None
        assert (hello.epoch, hello.reports) == (reporter.epoch, reporter.reports_endpoint)
        assert hello == await greet(reporter.requests_endpoint, context=context, timeout_s=PATIENCE_S, waits=False)
        reporter.mute = True
        for waits in (True, False):
            endpoint = reporter.requests_endpoint
            assert await greet(endpoint, context=context, timeout_s=0.05, waits=waits) is None
    assert await greet(reporter.requests_endpoint, context=context, timeout_s=0.05) is None
    async with asyncio.timeout(PATIENCE_S):
        # Use a port that was never bound: the reporter's own port may listen for a while yet, as ZMQ closes it
        # later.
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        assert await greet(endpoint, context=context, timeout_s=60 * PATIENCE_S, waits=False) is None
    with pytest.raises(zmq.ZMQError):
        await greet("nonsense", context=context, timeout_s=1)
    task = asyncio.create_task(greet(reporter.requests_endpoint, context=context, timeout_s=60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_greet_times_out_under_a_flood_of_nonsense(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = itertools.cycle([[b"", b"\xc1"], [b""], [b"", msgspec.msgpack.encode(SnapshotPart(1, "e", 1.0, 0, 0))]])
    monkeypatch.setattr("kvrouter.events.transport.link.Link.receive", lambda _: next(flood))
    assert await greet(f"{HOST}:9", context=context, timeout_s=0.05) is None


async def test_a_full_consumer_causes_no_busy_loop(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context, max_waiting=1) as stream:
        await stream.until_kind(Loaded)
        reporter.publish(stored(1))
        await eventually(lambda: stream.subscriber.waiting == 1)
        # Everything was read, so the next message wakes the descriptor.
        reporter.publish(stored(2))
        await asyncio.sleep(0.05)
        looks = 0
        readable = Link.readable

        def counted(self: Link) -> bool:
            nonlocal looks
            looks += 1
            return readable(self)

        monkeypatch.setattr(Link, "readable", counted)
        for _ in range(100):
            await asyncio.sleep(0)
        # Each turn looks at both links.
        assert looks < 20
        assert seqs(await stream.until_kind(ReportBatch, 2)) == [0, 1]


async def test_start_next_and_close_follow_their_contract(context: Context) -> None:
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
        await Stream(subscriber).until_kind(Loaded)
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
        subscriber.request_snapshot("closed")


async def test_a_fatal_socket_error_reaches_the_consumer(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)

        def broken(*_: object) -> None:
            raise zmq.ZMQError(zmq.ETERM)

        monkeypatch.setattr("kvrouter.events.transport.link.Link.take", broken)
        reporter.beat()
        with pytest.raises(zmq.ZMQError):
            await stream.until_kind(HeartbeatSeen)
