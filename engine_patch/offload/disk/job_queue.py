# SPDX-License-Identifier: Apache-2.0
"""A disk tier's jobs for its I/O threads, and their results for the caller's thread."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvrouter.engine_patch.offload.disk.format.io_threads import Executor

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


class JobQueue(Generic[JobT, ResultT]):
    """The jobs under way, whose number is the queue's length."""

    def __init__(self, make_executor: Callable[[], Executor]) -> None:
        """Start empty; `open` calls `make_executor`, and no job may be submitted before."""
        self._make_executor = make_executor
        self._under_way: dict[int, JobT] = {}
        self._next = 0
        # (job number, result) of the jobs that threads have finished, in that order. It is the only object that they
        # share with the caller's thread.
        self._done: deque[tuple[int, ResultT]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def open(self) -> None:
        """Make the executor."""
        self.executor = self._make_executor()

    def has_room(self, urgent: bool) -> bool:
        """Return whether `submit` may be called now for work of that kind."""
        return self.executor.has_room(urgent)

    def submit(self, job: JobT, work: Callable[[], ResultT], urgent: bool) -> None:
        """Queue a job. Call it only while there is room."""
        self._under_way[self._next] = job
        self.executor.submit(functools.partial(_run, self._done, self._next, work), urgent)
        self._next += 1

    def ended(self) -> Iterator[tuple[JobT, ResultT]]:
        """Yield the jobs that ended since the last call with their results, in the order in which they ended."""
        while self._done:
            number, result = self._done.popleft()
            yield self._under_way.pop(number), result

    def close(self) -> list[JobT]:
        """Wait for the present job of each thread, and return the jobs that will never begin."""
        self.executor.close()
        done_numbers = {number for number, _ in self._done}
        left_numbers = [number for number in self._under_way if number not in done_numbers]
        return [self._under_way.pop(number) for number in left_numbers]


def _run(done: deque[tuple[int, ResultT]], number: int, work: Callable[[], ResultT]) -> None:
    """Do the work in an I/O thread; a function and not a method, so that the thread does not depend on the tier."""
    done.append((number, work()))
