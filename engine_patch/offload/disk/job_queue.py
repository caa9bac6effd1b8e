# SPDX-License-Identifier: Apache-2.0
"""A disk tier's work for its I/O threads, and what came of it, for the caller's thread to take."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvrouter.engine_patch.offload.disk.format.io_threads import Executor

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


class JobQueue(Generic[JobT, ResultT]):
    """Length: jobs under way. make_executor: called by `open`, before which nothing is submitted."""

    def __init__(self, make_executor: Callable[[], Executor]) -> None:
        self._make_executor = make_executor
        self._under_way: dict[int, JobT] = {}
        self._next = 0
        # What threads have done, in that order; the one thing that they share with the caller's thread.
        self._done: deque[tuple[int, ResultT]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def open(self) -> None:
        self.executor = self._make_executor()

    def has_room(self, urgent: bool) -> bool:
        return self.executor.has_room(urgent)

    def submit(self, job: JobT, work: Callable[[], ResultT], urgent: bool) -> None:
        """To be called while there is room."""
        self._under_way[self._next] = job
        self.executor.submit(functools.partial(_run, self._done, self._next, work), urgent)
        self._next += 1

    def ended(self) -> Iterator[tuple[JobT, ResultT]]:
        """What is over since the last call, in the order in which it ended."""
        while self._done:
            number, result = self._done.popleft()
            yield self._under_way.pop(number), result

    def close(self) -> list[JobT]:
        """Waits for the job that each thread is in the middle of, and returns those that never begin."""
        self.executor.close()
        done = {number for number, _ in self._done}
        left = [number for number in self._under_way if number not in done]
        return [self._under_way.pop(number) for number in left]


def _run(done: deque[tuple[int, ResultT]], number: int, work: Callable[[], ResultT]) -> None:
    """In an I/O thread, which does not depend on the tier."""
    done.append((number, work()))
