# SPDX-License-Identifier: Apache-2.0
"""What a fault is, and what it may touch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.harness.core_router import CoreRouter
from tests.chaos.harness.engines import Engine
from tests.chaos.harness.shape import Kind
from tests.chaos.harness.valkey import Valkey

# Longer than a dead connection takes to be noticed where the kernel says so, and than the router's replay timeout.
SHORT_S, LONG_S = 0.2, 1.5


@dataclass(slots=True)
class Scene:
    """What faults may touch."""

    rng: random.Random
    engines: list[Engine]
    valkey: Valkey
    # None: processes, whose clock cannot be had.
    router: CoreRouter | None
    said: Callable[[str], None]
    # Engines whose missed blocks could not be had again, by fault of the fault.
    excused: set[str] = field(default_factory=set)

    def pause(self, first_s: float = SHORT_S, last_s: float = LONG_S) -> Awaitable[None]:
        return asyncio.sleep(self.rng.uniform(first_s, last_s))


@dataclass(frozen=True, slots=True)
class Fault:
    """kinds: the engines that it can hit; empty: it hits what all share. shape: sizes that the engines must have for
    it."""

    name: str
    act: Any
    kinds: frozenset[Kind] = frozenset()
    shape: dict[str, int] = field(default_factory=dict)
