# SPDX-License-Identifier: Apache-2.0
"""The engine patch's sockets to an ordered, typed stream: requests and reports of one publisher, read in an asyncio
loop.

Decides nothing about order (`cursor.py` does). It greets on the requests socket, connects to the reports that the
answer names, has snapshots asked for (`snapshot_client.py`), and judges who is silent.

A turn reads first and judges afterwards, so a stall of ours never looks like a publisher's silence. Turns are bounded,
so that other work on the loop gets its time. Nothing that comes over the wire is raised.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Callable

import msgspec
import zmq

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.decode import MAX_ERROR_CHARS, Unreadable, read_answer, read_report, read_seq
from kvrouter.events.patch.hello import greet, reachable
from kvrouter.events.patch.items import Loaded, ReportBatch, ReportItem, ReportResume
from kvrouter.events.patch.messages import REPORT_TOPIC, Events, Heartbeat, Hello, HelloRequest
from kvrouter.events.patch.settings import (
    DEFAULT_HEARTBEAT_S,
    MAX_HEARTBEAT_S,
    MIN_HEARTBEAT_S,
    SILENT_INTERVALS,
    ReportSettings,
)
from kvrouter.events.patch.snapshot_client import SnapshotAsker
from kvrouter.events.transport.link import Link, LinkSettings
from kvrouter.events.transport.outbox import Outbox
from kvrouter.events.transport.permits import Permits
from kvrouter.events.vllm.subscriber import SubscriberClosed

__all__ = ["ReportResume", "ReportSettings", "ReportSubscriber", "SubscriberClosed", "greet"]

log = logging.getLogger(__name__)

# Answers to greetings that wait unread.
_ANSWERS_HWM = 100

# Not the publisher's fault, and nothing that goes away: the consumer must know.
_FATAL_ERRORS = frozenset((zmq.ETERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class ReportSubscriber:
    """One publisher's reports. `start`, then `next` again and again from one task, then `close`."""

    def __init__(
        self,
        requests_endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        resume: ReportResume | None = None,
        settings: ReportSettings | None = None,
        refusal: Callable[[str], str | None] = lambda endpoint: None,
        server_key: str | None = None,
        permits: Permits | None = None,
    ) -> None:
        """Opens nothing yet. resume: go on from there without a snapshot, unless something was missed.

        refusal: why the endpoint that a `Hello` names must not be connected to, or None. server_key: as
        LinkSettings has it. permits: shared with others, to have few snapshots under way at once."""
        self._endpoint = requests_endpoint
        self._context = context
        self._refusal = refusal
        self._server_key = server_key
        settings = self._settings = settings or ReportSettings()
        self._cursor = ReportCursor(
            resume=resume,
            max_held=settings.max_held,
            max_held_bytes=settings.max_held_bytes,
            max_snapshot_blocks=settings.max_snapshot_blocks,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: Link | None = None
        self._live: Link | None = None
        self._asker = SnapshotAsker(
            self._cursor,
            lambda: self._connect(requests_endpoint, settings.snapshot_receive_hwm),
            settings,
            permits,
            self._schedule,
        )
        self._requests_up = False
        # The greeting that counts, when it was sent, and when it is sent again by itself.
        self._greeting_id = 0
        self._greeted_s = -math.inf
        self._greeting_due_s = math.inf
        # Whether this live socket had a peer before, and from when on it can be relied upon; None: no peer.
        self._live_known = False
        self._settled_s: float | None = None
        self._interval_s = settings.heartbeat_s
        self._heard = 0
        self._heard_s = 0.0
        self._silence_due_s = math.inf
        self._outbox: Outbox[ReportItem] = Outbox(
            settings.max_waiting, settings.max_waiting_bytes, size_bytes=_size_bytes, on_room=self._schedule
        )
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Nothing is read any more.
        self._ended = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """Items that the consumer has not taken yet."""
        return len(self._outbox)

    @property
    def held(self) -> int:
        """Messages held back while a snapshot is on its way."""
        return self._cursor.held

    @property
    def malformed(self) -> int:
        """Messages and answers that were none, so far."""
        return self._cursor.malformed_messages

    async def start(self) -> None:
        """Connects, without waiting for the peer. Raises zmq.ZMQError when the endpoint is no address."""
        if self._closed:
            raise SubscriberClosed
        if self._loop is not None:
            raise RuntimeError("the subscriber was started before")
        self._loop = asyncio.get_running_loop()
        try:
            self._requests = self._connect(self._endpoint, _ANSWERS_HWM)
        except BaseException:
            await self.close()
            raise
        self._heard_s = self._loop.time()
        self._silence_due_s = self._heard_s + SILENT_INTERVALS * self._interval_s
        self._schedule()

    async def next(self) -> list[ReportItem]:
        """The next items, at least one, at most `max_items`. One caller at a time.

        Raises SubscriberClosed when closed, also while waiting, and zmq.ZMQError when the sockets cannot go on.
        A cancelled call loses nothing.
        """
        if self._closed:
            raise SubscriberClosed
        return await self._outbox.take(self._settings.max_items)

    def ask_snapshot(self, reason: str) -> None:
        """What the consumer holds is not what the publisher says: no batch any more before the next `Loaded`."""
        log.info("snapshot asked for", extra={"endpoint": self._endpoint, "reason": reason})
        self._cursor.ask_snapshot()
        self._schedule()

    def expire(self, reason: str) -> None:
        """Known from elsewhere: this may be another life of the publisher than the one that was read so far."""
        log.info("publisher may be another", extra={"endpoint": self._endpoint, "reason": reason})
        self._cursor.expire()
        self._schedule()

    async def close(self) -> None:
        """Closes sockets and timers at once; what was not taken is dropped. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._end(SubscriberClosed())
        self._outbox.clear()

    def _end(self, error: Exception) -> None:
        self._ended = True
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None
        for link in (self._requests, self._live):
            if link is not None:
                link.close()
        self._requests = self._live = None
        self._asker.close()
        self._outbox.end(error)

    def _connect(self, endpoint: str, receive_hwm: int, *, topic: bytes | None = None) -> Link:
        assert self._loop is not None
        settings = self._settings
        return Link(
            self._context,
            endpoint,
            topic=topic,
            loop=self._loop,
            on_readable=self._schedule,
            settings=LinkSettings(
                receive_hwm,
                settings.max_message_bytes,
                settings.ping_s,
                settings.reconnect_min_s,
                settings.reconnect_max_s,
                self._server_key,
            ),
        )

    def _schedule(self) -> None:
        if self._turn is None and not self._ended and self._loop is not None:
            self._turn = self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._turn = None
        more, failure = False, None
        try:
            if self._outbox.full:
                # `on_room` schedules the turn that goes on. Looking calms the descriptors, which would call again and
                # again.
                self._readable()
            else:
                more = self._read_and_act()
        except zmq.ZMQError as error:
            # No socket, no descriptor, no context: nothing that goes away. The consumer must know.
            failure = error
        self._outbox.put(self._cursor.take())
        if failure is not None:
            self._end(failure)
        elif more:
            self._schedule()

    def _read_and_act(self) -> bool:
        """One turn; whether another must follow."""
        more = self._asker.read(self._now())
        more = self._read_greeting() or more
        # Connection news last, when nothing is left of the old connection.
        more = self._read_live() or more
        self._read_news()
        self._act(judge=not more)
        return more or self._readable()

    def _readable(self) -> bool:
        return self._asker.readable() or any(link.readable() for link in (self._requests, self._live) if link)

    def _read_live(self) -> bool:
        """Reads until nothing is left (False) or the turn's budget is spent (True)."""
        live = self._live
        if live is None:
            return False
        budget = self._settings.turn_bytes
        for _ in range(self._settings.turn_messages):
            frames = live.receive()
            if frames is None:
                return False
            if len(frames) != 3:
                self._cursor.malformed(f"a report of {len(frames)} frames: expected topic, seq, payload")
            # Another topic's name may begin like ours.
            elif frames[0] == REPORT_TOPIC:
                self._read_report(frames[1], frames[2])
            budget -= sum(map(len, frames))
            if budget <= 0:
                return True
        return True

    def _read_report(self, seq_frame: bytes, payload: bytes) -> None:
        cursor = self._cursor
        seq = read_seq(seq_frame)
        if seq is None:
            cursor.malformed(f"a report with the seq {seq_frame[:16].hex()}")
            return
        if self._settled_s is not None:
            self._settled_s = -math.inf
        message = read_report(payload)
        if message is None:
            return
        if isinstance(message, Unreadable):
            cursor.malformed(f"report {seq}: {message.reason}")
            if message.uses_seq:
                cursor.unreadable(seq, message.epoch, len(payload))
        elif isinstance(message, Events):
            cursor.events(seq, message, len(payload))
        elif isinstance(message, Heartbeat):
            heard = cursor.heard
            cursor.heartbeat(seq, message, len(payload))
            if cursor.heard > heard:
                self._interval_s = _interval_s(message.interval_s)
        else:
            cursor.catalog(seq, message)

    def _read_greeting(self) -> bool:
        assert self._requests is not None
        for _ in range(self._settings.turn_messages):
            frames = self._requests.receive()
            if frames is None:
                return False
            reply = read_answer(frames)
            if isinstance(reply, Unreadable):
                self._cursor.malformed(f"an answer: {reply.reason}")
            # Once it is wanted again, an answer under way may be of a life that is gone.
            if isinstance(reply, Hello) and reply.id == self._greeting_id and not self._cursor.greeting_wanted:
                self._interval_s = _interval_s(reply.heartbeat_s)
                if self._cursor.is_silent:
                    self._greeting_due_s = self._greeted_s + self._settings.silent_greeting_s
                else:
                    self._greeting_due_s = math.inf
                    self._silence_due_s = self._heard_s + SILENT_INTERVALS * self._interval_s
                self._cursor.hello(reply)
                self._follow_reports(reply.reports)
        return True

    def _follow_reports(self, reports: str) -> None:
        """Makes the live socket be one to where the publisher now says that it publishes."""
        endpoint = reachable(reports, self._endpoint)
        if endpoint is None:
            self._cursor.malformed(f"reports at {reports[:MAX_ERROR_CHARS]!r}: no endpoint for {self._endpoint}")
            return
        refusal = self._refusal(endpoint)
        if refusal:
            self._cursor.malformed(f"reports: {refusal[:MAX_ERROR_CHARS]}")
            return
        if self._live is not None:
            if self._live.endpoint == endpoint:
                return
            self._live.close()
            self._live = None
            self._settled_s = None
            self._cursor.disconnected()
        self._live_known = False
        try:
            self._live = self._connect(endpoint, self._settings.receive_hwm, topic=REPORT_TOPIC)
        except zmq.ZMQError as error:
            if error.errno in _FATAL_ERRORS:
                raise
            self._cursor.malformed(f"reports at {endpoint[:MAX_ERROR_CHARS]!r}: {error}")

    def _read_news(self) -> None:
        assert self._requests is not None
        for up in self._requests.take_news():
            self._requests_up = up
            # Whoever is there now may be another.
            self._cursor.greeting_wanted |= up
        for up in self._live.take_news() if self._live is not None else ():
            if up:
                self._cursor.connected()
                self._cursor.greeting_wanted |= self._live_known
                self._live_known = True
                self._settled_s = self._now() + self._settings.settle_s
            else:
                self._cursor.disconnected()
                self._settled_s = None

    def _act(self, *, judge: bool) -> None:
        """Everything that depends on the time. judge: all that had come is read."""
        now = self._now()
        if self._cursor.heard != self._heard:
            self._heard = self._cursor.heard
            self._heard_s = now
            self._silence_due_s = now + SILENT_INTERVALS * self._interval_s
        if judge:
            self._asker.judge(now)
            self._judge_silence(now)
        self._arm(min(self._greet(now), self._asker.ask(now, self._settled_s), self._silence_due_s))

    def _judge_silence(self, now: float) -> None:
        if now < self._silence_due_s:
            return
        if now - self._silence_due_s > self._settings.grace_s:
            # We ourselves come too late: what was sent in time may still be in ZMQ's hands.
            self._silence_due_s = now + self._settings.grace_s
            return
        self._silence_due_s = math.inf
        self._cursor.silent(now - self._heard_s)
        # It may publish elsewhere by now.
        self._cursor.greeting_wanted = True

    def _greet(self, now: float) -> float:
        """Greets when it is time; returns when it will be."""
        assert self._requests is not None
        if not self._requests_up:
            return math.inf
        due_s = self._greeting_due_s
        if self._cursor.greeting_wanted:
            due_s = min(due_s, self._greeted_s + self._settings.greeting_pause_s)
        if now < due_s:
            return due_s
        self._cursor.greeting_wanted = False
        self._greeting_id += 1
        self._greeted_s = now
        self._greeting_due_s = now + self._settings.answer_timeout_s
        self._requests.send(b"", msgspec.msgpack.encode(HelloRequest(self._greeting_id)))
        return self._greeting_due_s

    def _arm(self, due_s: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            if self._timer.when() <= due_s:
                # Soon enough; the turn that it causes looks again.
                return
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer = self._loop.call_at(due_s, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self._schedule()

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()


def _interval_s(said_s: float) -> float:
    return said_s if MIN_HEARTBEAT_S <= said_s <= MAX_HEARTBEAT_S else DEFAULT_HEARTBEAT_S


def _size_bytes(item: ReportItem) -> int:
    if isinstance(item, ReportBatch):
        return item.size_bytes
    if isinstance(item, Loaded):
        return item.snapshot.size_bytes
    return 0
