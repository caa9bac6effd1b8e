# SPDX-License-Identifier: Apache-2.0
"""Workers from a watched file: the file of the setting `workers_file`, or the settings file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.model.config.reloaded import Reloaded

T = TypeVar("T")


class FileSource(Generic[T]):
    """The workers that a file lists. A file that cannot be read, or is wrong, leaves the last list unchanged."""

    def __init__(self, name: str, file: Reloaded[T], workers: Callable[[T], Sequence[Candidate] | None]) -> None:
        """Show the workers of the file's present value.

        Args:
            name: The source's name.
            file: The file. This source reports its problems from now on.
            workers: Returns the workers that a value of the file lists, or None if it has no list.
        """
        self.name = name
        self.file = file
        self._workers = workers
        self._notify: Callable[[], None] = lambda: None
        self.shown = workers(file.value)
        self.problem = file.problem
        self._value = file.value
        file.is_reported = False
        file.subscribe(self._take)

    async def run(self, changed: Callable[[], None]) -> None:
        """Call `changed` when the list or the problem changed, until cancelled."""
        self._notify = changed
        # A source that was marked as down after an error shows the file again.
        self._take()
        await asyncio.get_running_loop().create_future()

    def _take(self) -> None:
        """Update the list and the problem from the file."""
        if self.file.value is not self._value:
            self._value = self.file.value
            workers = self._workers(self._value)
            # A settings file that no longer has a list of workers counts as an empty list.
            self.shown = () if workers is None and self.shown is not None else workers
        self.problem = self.file.problem
        self._notify()
