# SPDX-License-Identifier: Apache-2.0
"""The interface of all sources of workers, and the source that never changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.model.workers.source_precedence import STATIC


class Source(Protocol):
    """A source of workers."""

    # One of the names in `source_precedence.py`.
    name: str
    # All workers that the source lists now, None before its first list. While there is a problem, the last list stays.
    shown: Sequence[Candidate] | None
    # Why the source cannot be read now, or "" if it can. No worker is withdrawn while there is a problem.
    problem: str

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep `shown` and `problem` up to date until cancelled; call `changed` when either changed."""


class StaticSource:
    """The workers that the command line or the environment names."""

    name = STATIC
    problem = ""

    def __init__(self, shown: Sequence[Candidate]) -> None:
        self.shown: Sequence[Candidate] | None = shown

    async def run(self, changed: Callable[[], None]) -> None:
        """Wait until cancelled, because the list never changes."""
        await asyncio.get_running_loop().create_future()
