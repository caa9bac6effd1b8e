# SPDX-License-Identifier: Apache-2.0
"""The thread that fetches chunks from other engines: one `PeerLink` for each source.

The scheduler's thread hands over jobs and collects outcomes, and never waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import zmq

from kvrouter.engine_patch.offload.peer.data_plane import DataPlane
from kvrouter.engine_patch.offload.peer.lender import PeerFacts
from kvrouter.engine_patch.offload.peer.peer_access import PeerAccess
from kvrouter.engine_patch.offload.peer.peer_link import (
    Memory,
    Outcome,
    PeerLink,
    Pulled,
    PullJob,
    Question,
    unanswered,
)
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource
from kvrouter.engine_patch.offload.peer.peer_wire import MAX_MESSAGE_BYTES, ToSource, encode, read_by_reader
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog

# Transfers are polled this often; ZMQ wakes the thread for everything else.
TRANSFER_POLL_MS = 1
# The longest sleep, after which idle links are looked at.
IDLE_POLL_MS = 1_000
# A link without work is closed after this time.
IDLE_S = 300.0
# The pause after a fault of the thread itself.
FAULT_PAUSE_S = 0.1
# A source costs a socket, and NIXL's connection. Further sources wait until a link is idle.
MAX_LINKS = 128
# Messages that wait for one source, or of one source, and those that the thread reads before it serves other sources.
HIGH_WATER_MESSAGES = 256
# An overdue job ends at most this much after its deadline, because ZMQ counts whole milliseconds.
MIN_WAIT_MS = 1
WAKE = "inproc://wake"


class _Job(NamedTuple):
    source: PeerSource
    work: Question | PullJob


class _Open:
    """A link with its socket."""

    def __init__(self, link: PeerLink, socket: zmq.Socket[bytes]) -> None:
        self.link = link
        self.socket = socket
        self.used_s = 0.0


class PeerClient:
    """The links to all sources, and their thread."""

    def __init__(
        self,
        plane: DataPlane,
        memory: Memory,
        facts: Callable[[], PeerFacts],
        access: PeerAccess,
        clock: Callable[[], float],
        log: ThrottledLog,
    ) -> None:
        """Start the thread.

        Args:
            plane: Copies the data; used by the thread alone from here on.
            memory: The slots of this engine.
            facts: Returns the facts of this engine.
            access: Which sources may be used.
            clock: Returns seconds.
            log: The log.
        """
        self._plane, self._memory, self._facts, self._access = plane, memory, facts, access
        self._clock, self._log = clock, log
        # These are shared with the thread.
        self._jobs: deque[_Job] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._is_closing = threading.Event()
        self._links: dict[PeerSource, _Open] = {}
        # Its thread starts with the first check.
        self._checks = ThreadPoolExecutor(1, "kvrouter-check")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.bind(WAKE)
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.connect(WAKE)
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvrouter-fetch")
        self._thread.start()

    # The scheduler's thread

    def submit(self, source: PeerSource, work: Question | PullJob) -> None:
        """Queue a job; its outcomes come from `poll`."""
        self._jobs.append(_Job(source, work))
        self._wake()

    def poll(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes: list[Outcome] = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self) -> None:
        """End the thread. Jobs under way have no outcome."""
        self._is_closing.set()
        self._wake()
        self._thread.join()
        self._checks.shutdown()
        self._waker.close(0)
        self._context.term()
        self._plane.close()

    def _wake(self) -> None:
        # With a full queue of unread wake-ups the thread wakes anyway, and after any other error at its next turn.
        with contextlib.suppress(zmq.ZMQError):
            self._waker.send(b"", zmq.NOBLOCK)

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        try:
            while not self._is_closing.is_set():
                try:
                    self._turn(poller)
                except Exception as error:
                    self._log_fault(error)
                    self._fail_all()
                    # The next job must be served, too; the pause keeps an error that repeats from using a core.
                    self._is_closing.wait(FAULT_PAUSE_S)
        finally:
            for opened in self._links.values():
                # NIXL's connections end with the process; an open socket would keep `close` waiting forever.
                with contextlib.suppress(Exception):
                    opened.link.close()
                opened.socket.close(0)
            self._woken.close(0)

    def _log_fault(self, error: Exception) -> None:
        self._log.warning(f"fetch {type(error).__name__}", "a peer cannot be read", error=repr(error))

    def _fail_all(self) -> None:
        """End all jobs because of a fault in the program."""
        while self._jobs:
            self._refuse(self._jobs.popleft().work, PeerMiss.FAULT)
        for opened in self._links.values():
            self._fail(opened.link)

    def _fail(self, link: PeerLink) -> None:
        try:
            link.fail(self._clock())
        except Exception as error:
            # The outcomes come first, so only NIXL's connection is left.
            self._log_fault(error)

    def _turn(self, poller: zmq.Poller) -> None:
        """Wait for something to do, and do it."""
        ready = dict(poller.poll(self._wait_ms()))
        if self._woken in ready:
            self._woken.recv()
        now_s = self._clock()
        while self._jobs:
            self._begin(self._jobs.popleft(), poller, now_s)
        for source, opened in list(self._links.items()):
            try:
                if opened.socket in ready:
                    self._receive(source, opened, now_s)
                opened.link.tick(self._clock())
            except Exception as error:
                self._log_fault(error)
                self._fail(opened.link)
            if not opened.link.is_idle:
                opened.used_s = now_s
            elif now_s - opened.used_s > IDLE_S:
                self._close(source, poller)

    def _wait_ms(self) -> int:
        if any(opened.link.has_more for opened in self._links.values()):
            return 0
        if any(opened.link.is_copying for opened in self._links.values()):
            return TRANSFER_POLL_MS
        deadlines_s = [opened.link.next_deadline_s() for opened in self._links.values()]
        ends_s = [deadline_s for deadline_s in deadlines_s if deadline_s is not None]
        wait_ms = int((min(ends_s) - self._clock()) * 1000) + MIN_WAIT_MS if ends_s else IDLE_POLL_MS
        return min(max(wait_ms, MIN_WAIT_MS), IDLE_POLL_MS)

    def _begin(self, job: _Job, poller: zmq.Poller, now_s: float) -> None:
        try:
            opened = self._links.get(job.source) or self._connect(job.source, poller, now_s)
        except Exception as error:
            self._log_fault(error)
            opened = PeerMiss.FAULT
        if isinstance(opened, PeerMiss):
            self._refuse(job.work, opened)
            return
        try:
            opened.link.begin(job.work, now_s)
        except Exception as error:
            # The link knows the job by now.
            self._log_fault(error)
            self._fail(opened.link)

    def _refuse(self, work: Question | PullJob, miss: PeerMiss) -> None:
        if isinstance(work, PullJob):
            self._outcomes.extend(Pulled(key, slot, miss) for key, slot in zip(work.keys, work.slots, strict=True))
        else:
            self._outcomes.append(unanswered(work, miss))

    def _connect(self, source: PeerSource, poller: zmq.Poller, now_s: float) -> _Open | PeerMiss:
        socket = self._context.socket(zmq.DEALER)
        miss: PeerMiss | None = None
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt(zmq.IPV6, 1)
            if not self._access.protect_client(socket, source):
                miss = PeerMiss.FORBIDDEN
                self._log.warning(
                    f"peer {source}",
                    "chunks may be fetched only from listed peers, or without keys from this machine",
                    source=str(source),
                )
            elif not self._has_room(poller):
                miss = PeerMiss.BUSY
            else:
                socket.connect(source.endpoint)
                poller.register(socket, zmq.POLLIN)
        except zmq.ZMQError as error:
            miss = PeerMiss.GONE
            self._log.warning(
                f"peer {source}", "no socket can be opened for a peer", source=str(source), error=str(error)
            )
        except BaseException:
            socket.close()
            raise
        if miss is not None:
            socket.close()
            return miss

        def send(message: ToSource) -> None:
            # If the source takes no more messages, the job ends at its deadline.
            with contextlib.suppress(zmq.Again):
                socket.send(encode(message), zmq.NOBLOCK)

        link = PeerLink(self._plane, self._memory, self._facts, send, self._outcomes.append, self._checks)
        opened = self._links[source] = _Open(link, socket)
        opened.used_s = now_s
        return opened

    def _has_room(self, poller: zmq.Poller) -> bool:
        """Return whether one more link can be opened; the link that has been idle longest makes room if need be."""
        if len(self._links) < MAX_LINKS:
            return True
        idle = [(opened.used_s, name) for name, opened in self._links.items() if opened.link.is_idle]
        if idle:
            self._close(min(idle)[1], poller)
        return bool(idle)

    def _receive(self, source: PeerSource, opened: _Open, now_s: float) -> None:
        for _ in range(HIGH_WATER_MESSAGES):
            try:
                frame = opened.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            opened.link.received(read_by_reader(frame), now_s)
            if opened.link.refusal:
                self._log.warning(
                    f"refused by {source}", "a peer refuses its chunks", source=str(source), reason=opened.link.refusal
                )
                opened.link.refusal = ""

    def _close(self, source: PeerSource, poller: zmq.Poller) -> None:
        opened = self._links.pop(source)
        poller.unregister(opened.socket)
        opened.link.close()
        opened.socket.close(0)
