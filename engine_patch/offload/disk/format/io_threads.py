# SPDX-License-Identifier: Apache-2.0
"""A few threads that do I/O, behind bounded queues: submitting fails when there is no room.

Reads, for which requests wait, go before writes. A thread that is in the middle of a read or write
uses memory that its owner will free: `close` waits for it, and so does the end of the process, or of this object,
without a `close`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

log = logging.getLogger("vllm.kvrouter.offload")

# Never raises: a failure is part of its result, which it delivers itself.
Work: TypeAlias = Callable[[], None]


class Executor(Protocol):
    """Where the disk tier's work is done."""

    def has_room(self, urgent: bool) -> bool:
        """Whether `submit` would take work of that kind now. Only one thread submits, so that this stays true until it
        does."""

    def submit(self, work: Work, urgent: bool) -> bool:
        """Queues work, before all that is not urgent if it is. False: no room, or closed; it will not run."""

    def close(self) -> None:
        """Waits for work that runs; what has not begun will not."""


class _Queues:
    """What threads and submitters share; a thread must not keep the `IoThreads` alive."""

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.changed = threading.Condition()
        self.urgent: deque[Work] = deque()
        self.other: deque[Work] = deque()
        self.closed = False

    def of(self, urgent: bool) -> deque[Work]:
        return self.urgent if urgent else self.other

    def has_room(self, urgent: bool) -> bool:
        return not self.closed and len(self.of(urgent)) < self.max_queued


class IoThreads:
    """max_queued: waiting work, of the urgent and of the other kind each. Raises ValueError for numbers below 1."""

    def __init__(self, threads: int, max_queued: int, name: str) -> None:
        if threads < 1 or max_queued < 1:
            raise ValueError(f"at least 1 thread and a queue of 1 are needed, not {threads} and {max_queued}")
        self._queues = _Queues(max_queued)
        # Daemons, so that an engine that fails can end; what they are in the middle of is still waited for.
        self._threads = [
            threading.Thread(target=_serve, args=(self._queues,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._stop = weakref.finalize(self, _shut_down, self._queues, self._threads)
        for thread in self._threads:
            thread.start()

    def has_room(self, urgent: bool) -> bool:
        return self._queues.has_room(urgent)

    def submit(self, work: Work, urgent: bool) -> bool:
        queues = self._queues
        with queues.changed:
            if not queues.has_room(urgent):
                return False
            queues.of(urgent).append(work)
            queues.changed.notify()
        return True

    def close(self) -> None:
        self._stop()


def _serve(queues: _Queues) -> None:
    while True:
        with queues.changed:
            while not (queues.urgent or queues.other or queues.closed):
                queues.changed.wait()
            if queues.closed:
                return
            work = (queues.urgent or queues.other).popleft()
        try:
            work()
        except Exception:
            # The thread continues: without it, queued jobs would wait for ever.
            log.exception("disk work failed")
        # It holds the memory of a slot, and the next may be long in coming.
        del work


def _shut_down(queues: _Queues, threads: list[threading.Thread]) -> None:
    with queues.changed:
        queues.closed = True
        queues.urgent.clear()
        queues.other.clear()
        queues.changed.notify_all()
    for thread in threads:
        # The last reference may go in a thread of ours.
        if thread is not threading.current_thread():
            thread.join()
