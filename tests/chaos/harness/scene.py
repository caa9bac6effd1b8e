# SPDX-License-Identifier: Apache-2.0
"""The type of a fault, and the objects that faults act on."""

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

# Bounds of a fault's duration. The longer one exceeds the time in which a dead connection is noticed if the kernel
# reports it, and the router's replay timeout.
SHORT_S, LONG_S = 0.2, 1.5


@dataclass(slots=True)
class Scene:
    """The objects that faults may act on."""

    rng: random.Random
    engines: list[Engine]
    valkey: Valkey
    # None: the routers are processes, whose clock cannot be moved.
    router: CoreRouter | None
    # Writes a line into the trace.
    said: Callable[[str], None]
    # Engines whose missed blocks a router cannot recover because of the fault.
    excused: set[str] = field(default_factory=set)

    def pause(self, first_s: float = SHORT_S, last_s: float = LONG_S) -> Awaitable[None]:
        return asyncio.sleep(self.rng.uniform(first_s, last_s))


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    # Coroutine function that causes and ends the fault.
    act: Any
    # Kinds of engines that it can hit; empty: it hits the store or the router's clock, which all engines share.
    kinds: frozenset[Kind] = frozenset()
    # Sizes that the engines must have for it, as fields of `Shape`.
    shape: dict[str, int] = field(default_factory=dict)
