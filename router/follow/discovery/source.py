# SPDX-License-Identifier: Apache-2.0
"""Where workers come from: what every source has in common, and the one that never changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.model.workers.source_precedence import STATIC


class Source(Protocol):
    """name: one of source_precedence.py. shown: all workers that it knows now; None before the first time. problem: why
    it cannot know now, empty when it can; what it knew before stays in `shown`, and nothing is taken away because of
    that."""

    name: str
    shown: Sequence[Candidate] | None
    problem: str

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep `shown` and `problem` true until it is cancelled; call `changed` when either is another."""


class StaticSource:
    """The workers that the command line or the environment names."""

    name = STATIC
    problem = ""

    def __init__(self, shown: Sequence[Candidate]) -> None:
        self.shown: Sequence[Candidate] | None = shown

    async def run(self, changed: Callable[[], None]) -> None:
        """There is nothing to watch."""
        await asyncio.get_running_loop().create_future()
