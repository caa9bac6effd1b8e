# SPDX-License-Identifier: Apache-2.0
"""The patch's own publisher: a thread with a PUB socket for reports and a ROUTER for requests.

`docs/reference/protocol.md` describes both. The engine's thread only ever appends to a queue (`publish`); translation,
the ledger, encoding and sending happen in this thread. No reader can slow the engine: PUB drops messages for a slow
reader, which then loads a snapshot, and replies go only to clients with room for them. Each turn of the thread is
bounded, so that messages, heartbeats, requests and snapshots all progress under any load.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

import zmq

from kvrouter.engine_patch.reporter.counters import CounterLog, Counters
from kvrouter.engine_patch.reporter.event_queue import EventQueue, Make
from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.reporter.report_stream import Frames, ReportStream
from kvrouter.engine_patch.reporter.request_handler import RequestHandler
from kvrouter.engine_patch.reporter.snapshots import Sent
from kvrouter.engine_patch.setup.client_gate import ClientGate, ClientList
from kvrouter.engine_patch.setup.settings import ReporterSettings
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.patch.messages import DeclaredCatalog, Hello
from kvrouter.events.transport.binding import bind

__all__ = ["Reporter", "ReporterSettings"]

log = logging.getLogger("vllm.kvrouter.reports")

# Bounds of one turn: messages, and seconds. With 20 ms a heartbeat may be late by 2 percent of its interval.
TURN_MESSAGES = 64
TURN_S = 0.020
TURN_REQUESTS = 16

# Milliseconds from the first message to the turn that sends it. Meanwhile the engine's thread, which has just published
# the message, continues its step undisturbed, and messages that follow are taken in the same turn. Both threads need
# the interpreter; a GPU's work on the step takes longer than this.
GATHER_MS = 1

# Seconds until the next try while every snapshot client lacks room, because a ROUTER does not signal which client has
# room again.
BLOCKED_RETRY_S = 0.010

# Consecutive failed turns before reporting ends, because retrying does not repair such a fault.
MAX_FAILED_TURNS = 10

# A request has some 20 bytes, a subscription 11. ZMQ disconnects a peer that sends more than this.
MAX_MESSAGE_BYTES = 4_096
REQUESTS_HWM = 64

# ZMQ's own ping: the buffers of a peer that vanished silently are freed after this time.
PEER_PING_S = 5.0
PEER_TIMEOUT_S = 15.0

# Limits of an engine's wait at its shutdown: queued messages are sent within the first, and the thread is left behind
# after the second.
DRAIN_S = 0.5
JOIN_S = 2.0


class Reporter:
    """The publisher of reports, active from construction until `close`.

    In a forked child it does nothing, because its thread does not exist there. More than 15 attributes: it wires the
    parts of one thread, and everything else belongs to a part.
    """

    # The addresses as bound, with the port that the system chose in place of 0 or *.
    requests_endpoint: str
    reports_endpoint: str

    def __init__(
        self,
        *,
        requests: str,
        reports: str,
        settings: ReporterSettings,
        context: zmq.Context[zmq.Socket[bytes]],
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        new_epoch: Callable[[], str],
        dp_rank: int = 0,
        patch_version: str = "",
        features: Callable[[], dict[str, str]] = dict,
        curve_secret: bytes | None = None,
        clients: ClientList | None = None,
    ) -> None:
        """Bind both sockets and start the thread.

        Args:
            requests: The address for requests. It must be free, because readers connect there.
            reports: The address for reports. If its port is taken, another port of the same host is used, and `Hello`
                names it.
            settings: Limits and intervals.
            context: The ZMQ context of both sockets, unless `clients` is given.
            wall_clock: Returns seconds since 1970.
            clock: Returns monotonic seconds.
            new_epoch: Returns 16 random hex digits.
            dp_rank: The engine's data-parallel rank.
            patch_version: The version that `Hello` names.
            features: Returns the features that `Hello` names; called in the thread.
            curve_secret: A secret key with which both sockets use CURVE and refuse plain clients; None: they do not
                encrypt.
            clients: The clients that both sockets admit. The sockets then get a context of their own, because libzmq
                has one handler for all sockets of a context. None: all clients that know the public key.

        Raises:
            zmq.ZMQError: The address for requests cannot be bound.
        """
        self.counters = Counters()
        self._counter_log = CounterLog(self.counters, log)
        self._settings = settings
        self._clock = clock
        self._patch_version = patch_version
        self._features = features
        self._declared: DeclaredCatalog | None = None
        self._withholding: deque[tuple[Scope, str]] = deque()
        self._closing = False
        self._close_by_s = 0.0
        self._pid = os.getpid()
        self._log = ThrottledLog(log, clock)
        self._stream = ReportStream(
            max_ledger_blocks=settings.max_ledger_blocks,
            heartbeat_s=settings.heartbeat_s,
            dp_rank=dp_rank,
            counters=self.counters,
            wall_clock=wall_clock,
            clock=clock,
            new_epoch=new_epoch,
        )
        self._served_epoch = self._stream.epoch
        self._requests = RequestHandler(self._stream, self._hello, self._reply, settings, self.counters)
        self._gate = None if clients is None else ClientGate(clients, self._count_refused, self._log)
        if self._gate is not None:
            context = self._gate.context
        try:
            self._bind(context, requests, reports, curve_secret)
        except BaseException:
            if self._gate is not None:
                self._gate.close()
            raise
        self._queue = EventQueue(settings.max_queue_size, settings.max_dropped_bytes, wall_clock)
        self._next_beat_s = clock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvrouter-reporter")
        self._thread.start()

    def _count_refused(self) -> None:
        self.counters.clients_refused += 1

    def _bind(
        self, context: zmq.Context[zmq.Socket[bytes]], requests: str, reports: str, curve_secret: bytes | None
    ) -> None:
        settings = self._settings
        self._router = _open(context, zmq.ROUTER, requests, curve_secret)
        try:
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A reader that chooses its own address may reconnect before its old connection is closed.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._router.setsockopt(zmq.SNDHWM, settings.reply_hwm)
            self._router.setsockopt(zmq.RCVHWM, REQUESTS_HWM)
            self.requests_endpoint = bind(self._router, requests)
            self._pub = _open(context, zmq.PUB, reports, curve_secret)
            try:
                self._pub.setsockopt(zmq.SNDHWM, settings.report_hwm)
                self.reports_endpoint = _bind_near(self._pub, reports)
            except BaseException:
                self._pub.close(linger=0)
                raise
        except BaseException:
            self._router.close(linger=0)
            raise

    def publish(self, make: Make, batch_seq: int | None) -> None:
        """Queue one message; never block and never raise.

        Only one thread may call this at a time.

        Args:
            make: Returns the message's events. It is called in the reporter's thread or, if the queue is full, here.
            batch_seq: Seq of the engine's batch that the message repeats, or None.
        """
        if not self._closing and os.getpid() == self._pid:
            self._queue.put(make, batch_seq)

    def declare(self, catalog: DeclaredCatalog) -> None:
        """Publish the catalog if it differs from the last one.

        May be called from any thread; the catalog must not be changed afterwards.
        """
        if not self._closing and os.getpid() == self._pid:
            self._declared = catalog
            self._queue.wake()

    def withhold(self, scope: Scope, reason: str) -> None:
        """Stop reporting the blocks that the scope covers, for good, and withdraw them from readers at once.

        Heartbeats continue and give the reason. May be called from any thread.
        """
        if not self._closing and os.getpid() == self._pid:
            self._withholding.append((scope, reason))
            self._queue.wake()

    def close(self) -> None:
        """Send the queued messages for half a second at most, and end the thread.

        Waits 2 s at most; safe to call twice.
        """
        if os.getpid() != self._pid:
            return
        self._close_by_s = self._clock() + DRAIN_S
        self._closing = True
        self._queue.wake()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.warning("kvrouter: the reporter at %s did not end in %g s", self.requests_endpoint, JOIN_S)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue.fileno(), zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        failed_turns = 0
        pause_s = 0.0
        try:
            while failed_turns < MAX_FAILED_TURNS:
                try:
                    ready = self._sleep(poller, pause_s)
                    if self._closing and (not len(self._queue) or self._clock() >= self._close_by_s):
                        return
                    pause_s = self._turn(self._router in ready)
                    failed_turns = 0
                except zmq.ZMQError as error:
                    if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                        return
                    failed_turns += 1
                    self._fail(error)
                except Exception as error:
                    failed_turns += 1
                    self._fail(error)
            log.error(
                "kvrouter: reporting at %s given up: %d turns failed in a row; routers follow vLLM's own events",
                self.requests_endpoint,
                MAX_FAILED_TURNS,
            )
        finally:
            # The queue is no longer read.
            self._closing = True
            self._queue.close()
            self._pub.close(linger=0)
            self._router.close(linger=0)
            if self._gate is not None:
                self._gate.close()

    def _fail(self, error: Exception) -> None:
        # The turn may be half done, so the ledger's state is uncertain.
        self._stream.lose(f"reporter failed: {error!r}", f"turn {type(error).__name__}")

    def _sleep(self, poller: zmq.Poller, pause_s: float) -> dict[object, int]:
        if self._closing or (pause_s > 0 and not self._queue.begin_wait()):
            pause_s = 0
        # The time is rounded up; otherwise the thread would spin through the last millisecond.
        ready: dict[object, int] = dict(poller.poll(int(pause_s * 1_000) + (pause_s > 0)))
        self._queue.end_wait()
        if self._queue.fileno() in ready and not self._closing:
            ready.update(poller.poll(GATHER_MS))
        return ready

    def _turn(self, requested: bool) -> float:
        """Do a bounded share of all work, and return for how many seconds there is none unless the thread is woken."""
        # Send withdrawals before the queued events, because the events that the scope covers are void.
        while self._withholding:
            frames = self._stream.withhold(*self._withholding.popleft())
            self._send(frames)
            self.counters.sent += frames is not None
            self._next_beat_s = self._clock()
        self._send_messages()
        if self._stream.epoch != self._served_epoch:
            self._served_epoch = self._stream.epoch
            self._requests.void(self._stream.epoch, self._clock())
            self._next_beat_s = self._clock()
            self._send(self._stream.catalog_message())
        declared = self._declared
        if declared is not None and self._stream.declare(declared):
            self._send(self._stream.catalog_message())
        if requested:
            self._receive()
        now_s = self._clock()
        if now_s >= self._next_beat_s:
            self._send(self._stream.heartbeat())
            self.counters.heartbeats += 1
            self._next_beat_s = now_s + self._settings.heartbeat_s
            self._counter_log.write(now_s)
        progressed = self._requests.turn(now_s)
        if len(self._queue) or progressed:
            return 0.0
        until_beat_s = max(0.0, self._next_beat_s - now_s)
        return min(until_beat_s, BLOCKED_RETRY_S) if self._requests.busy else until_beat_s

    def _send_messages(self) -> None:
        stop_s = self._clock() + TURN_S
        for _ in range(TURN_MESSAGES):
            item = self._queue.take()
            if item is None:
                return
            frames = self._stream.pass_on(item)
            if frames is not None:
                self._send(frames)
                self.counters.sent += 1
            if self._clock() >= stop_s:
                return

    def _send(self, frames: Frames | None) -> None:
        if frames is not None:
            # PUB never reports that it is full: it drops messages for the readers that lag.
            self._pub.send_multipart(frames, zmq.NOBLOCK)

    def _receive(self) -> None:
        for _ in range(TURN_REQUESTS):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._requests.answer(frames, self._clock())

    def _reply(self, address: bytes, payload: bytes) -> Sent:
        for last in (False, True):
            try:
                self._router.send_multipart((address, b"", payload), zmq.NOBLOCK)
                return Sent.YES
            except zmq.Again:
                if not last:
                    # Reading EVENTS makes ZMQ notice at once how much a client has read.
                    self._router.getsockopt(zmq.EVENTS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return Sent.GONE
        return Sent.FULL

    def _hello(self, request_id: int) -> Hello:
        stream = self._stream
        try:
            features = self._features()
        except Exception as error:
            self._log.warning(f"features {type(error).__name__}", "features not readable", error=repr(error))
            features = {}
        return Hello(
            request_id,
            stream.epoch,
            stream.started_s,
            stream.next_seq,
            self.reports_endpoint,
            self._settings.heartbeat_s,
            patch_version=self._patch_version,
            catalog_version=stream.catalog_version,
            catalog=stream.catalog,
            features=features,
            withheld=stream.withheld,
        )


def _open(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, curve_secret: bytes | None
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    if curve_secret is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(PEER_PING_S * 1_000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(PEER_TIMEOUT_S * 1_000))
    # IPv6 is on only for an IPv6 address, as in vLLM, so that * stands for the IPv4 wildcard.
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def _bind_near(socket: zmq.Socket[bytes], endpoint: str) -> str:
    try:
        return bind(socket, endpoint)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE or not endpoint.startswith("tcp://"):
            raise
    bound = bind(socket, f"{endpoint.rpartition(':')[0]}:*")
    log.warning("kvrouter: %s is taken: reports are published at %s, as announced to readers", endpoint, bound)
    return bound
