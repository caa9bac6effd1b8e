# SPDX-License-Identifier: Apache-2.0
"""Sockets to an ordered, typed stream: one publisher's SUB and replay sockets, read in an asyncio loop.

Decides nothing about order (`batch_cursor.py` does) and decodes nothing. One subscriber follows one publisher; several
publishers behind one endpoint are not told apart. Runs on asyncio's own loop and on uvloop.

Plain ZMQ sockets are read through their file descriptor, because zmq.asyncio costs some 40 us a message. That one
is edge-triggered and may be consumed by any call on the socket, so each turn ends with a look at what is still
readable, and comes back by itself if anything is. A turn is bounded, so that other work on the loop gets its time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrouter.events.transport.permits import Permit, Permits
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import ResumePoint, StreamItem
from kvrouter.events.vllm.wire import END_SEQ, MAX_SEQ, SEQ_BYTES

__all__ = ["Subscriber", "SubscriberClosed", "SubscriberSettings"]

# How soon an overdue answer is looked at again while the consumer is behind.
MIN_TIMER_S = 0.05


class SubscriberClosed(Exception):
    """`next` on a closed subscriber."""


class Subscriber:
    """One publisher's stream. `start`, then `next` again and again from one task, then `close`."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        topic: bytes = b"",
        resume: ResumePoint | None = None,
        settings: SubscriberSettings | None = None,
        permits: Permits | None = None,
    ) -> None:
        """Opens nothing yet. topic: prefix, as ZMQ matches it. resume: go on from there, if it can be proven. permits:
        shared with others, to have few replays under way at once."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._context = context
        self._topic = topic
        self._settings = settings or SubscriberSettings()
        self._permits = permits
        self._permit: Permit | None = None
        self._cursor = Cursor(
            replay=replay_endpoint is not None,
            resume=resume,
            max_held=self._settings.max_held,
            max_held_bytes=self._settings.max_held_bytes,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._fds: dict[int, int] = {}
        self._replay_number = 0
        self._waiting: deque[StreamItem] = deque()
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._turn: asyncio.Handle | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._last_live_s = 0.0
        self._last_reply_s = 0.0
        self._failure: zmq.ZMQError | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Items that the consumer has not taken yet."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Live batches held back while a replay runs."""
        return self._cursor.held

    async def start(self) -> None:
        """Connects, without waiting for the peer. Raises zmq.ZMQError when the endpoint is no address."""
        if self._closed:
            raise SubscriberClosed
        if self._live is not None:
            raise RuntimeError("the subscriber was started before")
        self._loop = asyncio.get_running_loop()
        try:
            if self._replay_endpoint is not None:
                # Names a bad endpoint now, not at the first gap.
                self._open_replay().close(linger=0)
            self._open_live()
        except BaseException:
            await self.close()
            raise
        if self._endpoint.startswith("inproc:"):
            # ZMQ reports no connections within a process.
            self._cursor.connected()
            self._on_connected()
        self._schedule()

    async def next(self) -> list[StreamItem]:
        """The next items, at least one, at most `max_items`. One caller at a time.

        Raises SubscriberClosed when closed, also while waiting, and zmq.ZMQError when the sockets cannot go on.
        A cancelled call loses nothing.
        """
        if self._closed:
            raise SubscriberClosed
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("another task is waiting for this subscriber")
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter
            if self._closed:
                raise SubscriberClosed
        was_full = self._full()
        items = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._settings.max_items))]
        self._waiting_bytes -= sum(_size(item) for item in items)
        if was_full:
            self._schedule()
        return items

    def expire(self, reason: str) -> None:
        """Known from elsewhere: this may be another life of the publisher than the one that was read so far. It is read
        anew."""
        self._cursor.expire(reason)
        self._schedule()

    async def close(self) -> None:
        """Closes sockets and timers at once; what was not taken is dropped. Safe to call twice."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._close_live()
        self._close_replay()
        self._wake()

    def _open_live(self) -> None:
        settings = self._settings
        live = self._live = self._context.socket(zmq.SUB)
        self._configure(live, settings.receive_hwm)
        live.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_s * 1000))
        live.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.heartbeat_s * 3000))
        self._monitor = live.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        live.subscribe(self._topic)
        live.connect(self._endpoint)
        self._watch(live)
        self._watch(self._monitor)

    def _close_live(self) -> None:
        for socket in (self._live, self._monitor):
            if socket is not None:
                self._unwatch(socket)
        if self._live is not None:
            self._live.disable_monitor()
            self._live.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._live = self._monitor = None

    def _reopen(self) -> None:
        """ZMQ connects again by itself, but never after a message over the limit or another breach of its protocol."""
        try:
            self._close_live()
            self._open_live()
        except zmq.ZMQError as error:
            self._failure = error
            self._wake()
            return
        self._arm("reopen", self._settings.reopen_s, self._reopen)
        self._schedule()

    def _configure(self, socket: zmq.Socket[bytes], receive_hwm: int) -> None:
        settings = self._settings
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, receive_hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, int(settings.reconnect_min_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(settings.reconnect_max_s * 1000))
        if self._endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        fd = int(socket.getsockopt(zmq.FD))
        self._fds[id(socket)] = fd
        self._loop.add_reader(fd, self._schedule)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        fd = self._fds.pop(id(socket), None)
        if fd is not None and self._loop is not None:
            self._loop.remove_reader(fd)

    def _schedule(self) -> None:
        if self._turn is None and not self._closed and self._loop is not None:
            self._turn = self._loop.call_soon(self._run_turn)

    def _full(self) -> bool:
        settings = self._settings
        return len(self._waiting) >= settings.max_waiting or self._waiting_bytes >= settings.max_waiting_bytes

    def _run_turn(self) -> None:
        self._turn = None
        if self._full():
            # `next` schedules the turn that goes on.
            return
        try:
            more = self._read_replay()
            # Connection news last, when nothing is left of the old connection: its messages must not be taken for the
            # new one's.
            more = self._read_live() or self._read_monitor() or more
            self._follow_request()
            more = more or self._readable()
        except zmq.ZMQError as error:
            # No socket, no descriptor, no context: nothing that goes away. The consumer must know.
            self._failure = error
            more = False
        self._publish_items()
        self._wake()
        if more:
            self._schedule()

    def _readable(self) -> bool:
        sockets = (self._live, self._monitor, self._replay)
        return any(socket is not None and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in sockets)

    def _read_live(self) -> bool:
        """Reads until nothing is left (False) or the turn's budget is spent (True)."""
        live = self._live
        assert live is not None
        assert self._loop is not None
        budget = self._settings.turn_bytes
        for number in range(self._settings.turn_batches):
            try:
                frames = live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if number == 0:
                self._last_live_s = self._loop.time()
            if len(frames) != 3:
                self._cursor.malformed(f"a live message of {len(frames)} frames: expected topic, seq, payload")
                continue
            seq, payload = frames[1], frames[2]
            if (value := self._seq(seq, "live")) is not None:
                self._cursor.live(value, payload)
            budget -= len(payload)
            if budget <= 0:
                return True
        return True

    def _read_replay(self) -> bool:
        # A request that has been replaced has nothing to say; its socket is closed after this turn.
        cursor = self._cursor
        budget = self._settings.turn_bytes
        for number in range(self._settings.turn_batches):
            if self._replay is None or cursor.request is None or cursor.request.number != self._replay_number:
                return False
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if number == 0:
                assert self._loop is not None
                self._last_reply_s = self._loop.time()
            # vLLM before 0.26 sends no topic.
            if len(frames) not in (3, 4) or frames[0] != b"":
                cursor.malformed(
                    f"a replay message of {len(frames)} frames: expected an empty one, topic, seq, payload"
                )
                continue
            seq, payload = frames[-2], frames[-1]
            if seq == END_SEQ:
                cursor.replay_ended()
            elif (value := self._seq(seq, "replay")) is not None:
                cursor.replayed(value, payload)
            budget -= len(payload)
            if budget <= 0:
                return True
        return True

    def _seq(self, frame: bytes, source: str) -> int | None:
        if len(frame) != SEQ_BYTES:
            self._cursor.malformed(f"a {source} seq of {len(frame)} bytes: expected {SEQ_BYTES}")
            return None
        value = int.from_bytes(frame, "big")
        if value > MAX_SEQ:
            self._cursor.malformed(f"a {source} seq of {value}: beyond {MAX_SEQ}")
            return None
        return value

    def _read_monitor(self) -> bool:
        assert self._monitor is not None
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            event = parse_monitor_message(frames)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                if "reopen" in self._timers:
                    self._timers.pop("reopen").cancel()
                self._cursor.connected()
                self._on_connected()
            elif event == zmq.Event.DISCONNECTED:
                self._cursor.disconnected()
                self._arm("reopen", self._settings.reopen_s, self._reopen)

    def _on_connected(self) -> None:
        if self._replay_endpoint is not None:
            self._arm("check", self._settings.settle_s, self._check)

    def _open_replay(self) -> zmq.Socket[bytes]:
        assert self._replay_endpoint is not None
        replay = self._context.socket(zmq.DEALER)
        try:
            self._configure(replay, self._settings.replay_receive_hwm)
            replay.connect(self._replay_endpoint)
        except BaseException:
            replay.close(linger=0)
            raise
        return replay

    def _follow_request(self) -> None:
        """Makes the replay socket be what the cursor wants: a fresh one a request, so that answers cannot mix."""
        assert self._loop is not None
        request = self._cursor.request
        number = 0 if request is None else request.number
        if number != self._replay_number:
            self._replay_number = number
            self._close_replay()
            if request is not None and self._permits is not None:
                self._permit = self._permits.ask(self._schedule)
        waits = self._permit is not None and not self._permit.granted
        if request is None or self._replay is not None or waits:
            return
        self._replay = self._open_replay()
        self._watch(self._replay)
        self._replay.send_multipart((b"", request.start.to_bytes(SEQ_BYTES, "big")), zmq.NOBLOCK)
        self._last_reply_s = self._loop.time()
        self._arm("reply", self._settings.replay_timeout_s, self._reply_due)

    def _close_replay(self) -> None:
        if self._permit is not None:
            self._permit.end()
            self._permit = None
        if self._replay is not None:
            self._unwatch(self._replay)
            self._replay.close(linger=0)
            self._replay = None

    def _publish_items(self) -> None:
        items = self._cursor.take()
        if not items:
            return
        self._waiting.extend(items)
        self._waiting_bytes += sum(_size(item) for item in items)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._waiting or self._failure or self._closed):
            waiter.set_result(None)

    def _arm(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        assert self._loop is not None
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(delay_s, call)

    def _reply_due(self) -> None:
        assert self._loop is not None
        if self._cursor.request is None:
            return
        left_s = self._last_reply_s + self._settings.replay_timeout_s - self._loop.time()
        # A full queue is our own delay, not the publisher's.
        if left_s > 0 or self._full():
            self._arm("reply", max(left_s, MIN_TIMER_S), self._reply_due)
            return
        self._cursor.replay_overdue()
        self._schedule()

    def _check_due(self) -> None:
        assert self._loop is not None
        if self._cursor.degraded or self._loop.time() - self._last_live_s >= self._settings.idle_check_s:
            self._check()
        else:
            self._arm_check()

    def _check(self) -> None:
        self._cursor.check()
        self._schedule()
        self._arm_check()

    def _arm_check(self) -> None:
        if self._settings.idle_check_s > 0:
            self._arm("check", self._settings.idle_check_s, self._check_due)


def _size(item: StreamItem) -> int:
    payload = getattr(item, "payload", None)
    return 0 if payload is None else len(payload)
