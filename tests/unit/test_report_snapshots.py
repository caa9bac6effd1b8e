# SPDX-License-Identifier: Apache-2.0
"""Requests for snapshots by the report subscriber, over real sockets: permits, failures, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from kvrouter.events.patch.items import Loaded, SnapshotFailed
from kvrouter.events.patch.messages import Refused, SnapshotRequest
from kvrouter.events.transport.permits import Permits
from kvrouter.events.vllm.stream_items import Malformed
from tests.support.fake_reporter import Context, FakeReporter, refused, stored
from tests.support.report_stream import eventually, kinds, only, read, seqs


async def test_no_more_snapshots_at_once_than_are_permitted(context: Context) -> None:
    permits = Permits(rng=Random(1), at_once=1)
    first = permits.request(lambda: None)
    async with FakeReporter(context) as reporter:
        reporter.publish(stored(1))
        async with read(reporter, context, permits=permits) as stream:
            await eventually(lambda: permits.waiting)
            assert reporter.asked(SnapshotRequest) == 0
            first.end()
            await stream.until_kind(Loaded)
            # The answer ended its permit, so another one is granted at once.
            await eventually(lambda: permits.request(lambda: None).granted)


async def test_messages_published_during_a_snapshot_follow_it(context: Context) -> None:
    async with FakeReporter(context) as reporter:

        def busy(request: SnapshotRequest) -> list[Any]:
            # The ledger is frozen first, and then messages overtake the answer.
            answer = reporter.honest(request)
            for number in range(50):
                reporter.publish(stored(number))
            return answer

        reporter.snapshot_script.append(busy)
        async with read(reporter, context) as stream:
            items = await stream.until(lambda items: 49 in seqs(items))
            assert seqs(items) == list(range(50))
            await stream.until_proven(reporter)


async def test_a_consumer_that_doubts_gets_another_snapshot(context: Context) -> None:
    async with FakeReporter(context) as reporter, read(reporter, context) as stream:
        await stream.until_kind(Loaded)
        stream.subscriber.request_snapshot("digest differs")
        assert kinds(await stream.until_kind(Loaded)) == ["FellBehind", "Loaded", "CaughtUp"]
        await stream.until_proven(reporter)
        assert reporter.asked(SnapshotRequest) == 2


def without(index: int) -> Callable[[list[Any]], list[Any]]:
    return lambda parts: parts[:index] + parts[index + 1 :]


def with_part(at: int, /, **change: Any) -> Callable[[list[Any]], list[Any]]:
    def changed(parts: list[Any]) -> list[Any]:
        parts[at] = msgspec.structs.replace(parts[at], **change)
        return parts

    return changed


# Each with the time after which an answer is missing: short where the last part does not come.
@pytest.mark.parametrize(
    ("fault", "answer_timeout_s"),
    [
        (without(0), 60.0),
        (without(1), 60.0),
        (with_part(1, epoch="b" * 16), 60.0),
        (with_part(1, index=2**63), 60.0),
        (with_part(0, hashes=b"123"), 60.0),
        (with_part(0, id=12345), 60.0),
        (with_part(-1, next_seq=77), 60.0),
        (lambda parts: [b"\xc1"], 60.0),
        (lambda parts: [*parts[:1], msgspec.msgpack.encode({"type": "snapshot"})], 60.0),
        (without(-1), 0.05),
        (lambda parts: [], 0.05),
    ],
)
async def test_a_snapshot_that_is_unusable_or_missing_is_requested_again(
    context: Context, fault: Any, answer_timeout_s: float
) -> None:
    async with FakeReporter(context) as reporter:
        reporter.publish(stored(1, 2, 3, 3))
        reporter.snapshot_script.append(lambda request: fault(reporter.honest(request)))
        async with read(reporter, context, answer_timeout_s=answer_timeout_s) as stream:
            assert "SnapshotFailed" in only(await stream.until_kind(Loaded), SnapshotFailed, Loaded)
            await stream.until_proven(reporter)


async def test_answers_of_unknown_types_and_other_requests_are_skipped(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        later = msgspec.msgpack.encode({"type": "later"})
        reporter.snapshot_script.append(
            lambda request: [later, Refused(request.id + 1, "another's"), *reporter.honest(request)]
        )
        async with read(reporter, context) as stream:
            assert only(await stream.until_kind(Loaded), SnapshotFailed, Malformed) == []


@pytest.mark.parametrize("retry_s", [0.01, None, float("nan"), float("inf"), 1e9, -1.0])
async def test_a_refused_snapshot_is_requested_again_after_the_named_pause(
    context: Context, retry_s: float | None
) -> None:
    async with FakeReporter(context) as reporter:
        reporter.snapshot_script.append(refused(retry_s))
        async with read(reporter, context, max_snapshot_pause_s=0.05) as stream:
            items = await stream.until_kind(Loaded)
            assert [item for item in items if isinstance(item, SnapshotFailed)] == [SnapshotFailed("refused: busy")]


async def test_no_request_is_sent_during_a_long_refusal(context: Context) -> None:
    async with FakeReporter(context) as reporter:
        reporter.snapshot_script.append(refused(20.0))
        async with read(reporter, context) as stream:
            await stream.until_kind(SnapshotFailed)
            for _ in range(20):
                reporter.publish(stored(1))
                await asyncio.sleep(0.005)
            assert reporter.asked(SnapshotRequest) == 1
            assert stream.subscriber.held == 0
