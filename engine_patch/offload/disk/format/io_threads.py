# SPDX-License-Identifier: Apache-2.0
"""A few threads that do I/O, behind bounded queues: submitting fails when there is no room.

Reads, for which requests wait, go before writes. A thread in the middle of a read or write uses memory that its owner
will free, so `close` waits for it. Without a `close`, the end of the process or of the object waits for it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

log = logging.getLogger("vllm.kvrouter.offload")

# A unit of work never raises: a failure is part of its result, which it delivers itself.
Work: TypeAlias = Callable[[], None]


class Executor(Protocol):
    """The threads, or a test's replacement, that do the disk tier's work."""

    def has_room(self, urgent: bool) -> bool:
        """Return whether `submit` would accept work of that kind now.

        Only one thread submits, so the result stays true until that thread submits.
        """

    def submit(self, work: Work, urgent: bool) -> bool:
        """Queue work, before all other work if it is urgent.

        Returns False without room or after `close`; the work will then not run.
        """

    def close(self) -> None:
        """Wait for the work that runs; work that has not begun will not run."""


class _Queues:
    """The queues that the threads share with those who submit work.

    The threads refer to this object and not to the `IoThreads`, which could otherwise never be garbage-collected.
    """

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.changed = threading.Condition()
        self.urgent: deque[Work] = deque()
        self.other: deque[Work] = deque()
        self.closed = False

    def of(self, urgent: bool) -> deque[Work]:
        """Return the queue of urgent work or of other work."""
        return self.urgent if urgent else self.other

    def has_room(self, urgent: bool) -> bool:
        """Return whether the queue of that kind accepts work."""
        return not self.closed and len(self.of(urgent)) < self.max_queued


class IoThreads:
    """The real threads, which run urgent work first."""

    def __init__(self, threads: int, max_queued: int, name: str) -> None:
        """Start the threads.

        Args:
            threads: The number of threads.
            max_queued: Waiting work, separately for the urgent and the other kind.
            name: The prefix of the threads' names.

        Raises:
            ValueError: A number is below 1.
        """
        if threads < 1 or max_queued < 1:
            raise ValueError(f"at least 1 thread and a queue of 1 are needed, not {threads} and {max_queued}")
        self._queues = _Queues(max_queued)
        # The threads are daemons, so that an engine that fails can end; their present work is still awaited.
        self._threads = [
            threading.Thread(target=_serve, args=(self._queues,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._stop = weakref.finalize(self, _shut_down, self._queues, self._threads)
        for thread in self._threads:
            thread.start()

    def has_room(self, urgent: bool) -> bool:
        """Return whether `submit` would accept work of that kind now."""
        return self._queues.has_room(urgent)

    def submit(self, work: Work, urgent: bool) -> bool:
        """Queue work. Return False without room or after `close`."""
        queues = self._queues
        with queues.changed:
            if not queues.has_room(urgent):
                return False
            queues.of(urgent).append(work)
            queues.changed.notify()
        return True

    def close(self) -> None:
        """Wait for the work that runs, and drop the rest."""
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
            # The thread continues, because queued jobs would otherwise wait forever.
            log.exception("disk work failed")
        # The work holds the memory of a slot, and the next work may come much later.
        del work


def _shut_down(queues: _Queues, threads: list[threading.Thread]) -> None:
    with queues.changed:
        queues.closed = True
        queues.urgent.clear()
        queues.other.clear()
        queues.changed.notify_all()
    for thread in threads:
        # One of these threads may drop the last reference to the object.
        if thread is not threading.current_thread():
            thread.join()
