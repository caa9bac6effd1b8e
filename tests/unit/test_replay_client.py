# SPDX-License-Identifier: Apache-2.0
"""Replays: when one is requested, read and given up. The time and the link are arguments, so there are no sockets."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import cast

from kvrouter.events.transport.deadline import Deadline
from kvrouter.events.transport.held_queue import HeldQueue
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permits
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.replay_client import ReplayClient
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Batch, ReplayFailed

SETTINGS = SubscriberSettings(answer_timeout_s=5.0, grace_s=0.25)


class Wire:
    """Link without a socket."""

    def __init__(self) -> None:
        self.inbox: list[list[bytes]] = []
        self.sent: list[tuple[bytes, ...]] = []
        self.closed = False
        self.flood = ""

    def read(self, handle: Callable[[list[bytes]], None], most: int, most_bytes: int) -> bool:
        for frames in self.inbox:
            handle(frames)
        self.inbox.clear()
        return False

    def send(self, *frames: bytes) -> None:
        self.sent.append(frames)

    def close(self) -> None:
        self.closed = True


class Replay:
    """Connected cursor with its client, and every link that the client opened."""

    def __init__(self, permits: Permits | None = None) -> None:
        self.wires: list[Wire] = []
        self.cursor = Cursor(replay=True)
        self.client = ReplayClient(self.cursor, self._connect, SETTINGS, permits, lambda: None)
        self.cursor.connected()
        self.cursor.take()

    def _connect(self) -> Link:
        self.wires.append(Wire())
        return cast("Link", self.wires[-1])

    def failed(self) -> bool:
        return any(isinstance(item, ReplayFailed) for item in self.cursor.take())


def test_an_overdue_replay_is_given_up() -> None:
    replay = Replay()
    assert replay.client.request(10.0) == 15.0
    assert replay.wires[0].sent == [(b"", bytes(8))]
    replay.client.read(14.9)
    assert not replay.failed()
    replay.client.read(15.1)
    assert replay.failed()


def test_an_answer_that_progresses_has_its_whole_time_again() -> None:
    replay = Replay()
    replay.client.request(10.0)
    replay.wires[0].inbox.append([b"", b"", bytes(8), b"batch"])
    replay.client.read(14.0)
    assert replay.client.request(14.0) == 19.0


def test_after_our_own_stall_a_replay_has_time_to_arrive() -> None:
    replay = Replay()
    replay.client.request(10.0)
    replay.client.read(60.0)
    replay.client.read(60.2)
    assert not replay.failed()
    replay.client.read(60.3)
    assert replay.failed()


def test_an_answer_to_a_replaced_request_is_ignored() -> None:
    replay = Replay()
    replay.client.request(10.0)
    replay.cursor.expire("the engine restarted")
    replay.wires[0].inbox.append([b"", b"", bytes(8), b"of the old life"])
    replay.client.read(11.0)
    assert not any(isinstance(item, Batch) for item in replay.cursor.take())
    replay.client.request(11.0)
    assert [wire.closed for wire in replay.wires] == [True, False]


def test_a_replaced_request_is_never_overdue() -> None:
    replay = Replay()
    replay.client.request(10.0)
    replay.cursor.expire("the engine restarted")
    replay.client.read(15.1)
    assert not replay.failed()


async def test_a_replay_that_waits_for_its_permit_is_not_overdue() -> None:
    permits = Permits(rng=Random(1), at_once=1)
    first = permits.request(lambda: None)
    replay = Replay(permits)
    assert replay.client.request(10.0) == math.inf
    replay.client.read(60.0)
    assert not replay.failed()
    first.end()
    assert replay.client.request(60.0) == 65.0


async def test_a_finished_replay_returns_its_permit() -> None:
    permits = Permits(rng=Random(1), at_once=1)
    replay = Replay(permits)
    replay.client.request(10.0)
    assert not permits.request(lambda: None).granted
    replay.cursor.replay_ended()
    assert replay.client.request(10.1) == math.inf
    assert permits.waiting == 0


def test_a_deadline_never_passes_until_it_is_set() -> None:
    deadline = Deadline(0.25)
    assert not deadline.has_passed(100.0)
    assert not deadline.has_passed(100.3)


def test_a_held_queue_drops_the_oldest_beyond_either_bound_and_never_the_newest() -> None:
    queue: HeldQueue[str] = HeldQueue(2, 100)
    assert queue.append(1, "a", 10) == []
    assert queue.append(2, "b", 10) == []
    assert queue.append(3, "c", 10) == [(1, "a", 10)]
    assert queue.append(4, "d", 500) == [(2, "b", 10), (3, "c", 10)]
    assert (len(queue), queue.size_bytes) == (1, 500)
