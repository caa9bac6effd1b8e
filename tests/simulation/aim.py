# SPDX-License-Identifier: Apache-2.0
"""Faults that wait for a moment: a part of them begins when a stream or process that they affect is in a rare state.

A follower is in most of its phases for milliseconds, so a fault at a random time nearly always meets one of the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from kvrouter.router.follow.streams.stream_machine import Phase
from kvrouter.router.model.workers.stream_state import StreamState
from tests.simulation.coverage import NO_PROCESS, STARTING, UNKNOWN_WORKER, Observer
from tests.simulation.faults import Fault
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.written import MOMENTS, UNREGISTERED, Written

AIMED_SHARE = 0.6
# How long a fault waits for its state. Then it begins nevertheless.
MOST_WAIT_S = 10.0
# How often states are looked at that no step of the stream machine shows.
LOOK_S = 0.05
# The states for which faults wait, and how often each is drawn: the shorter it lasts, the more often.
RARE_STATES = {
    f"phase {NO_PROCESS}": 1,
    f"phase {STARTING}": 1,
    f"phase {UNKNOWN_WORKER}": 1,
    f"phase {Phase.WAITING.value}": 4,
    f"phase {Phase.LOOKING.value}": 4,
    f"phase {Phase.PAUSED.value}": 3,
    f"shown {StreamState.CONNECTING.value}": 1,
    f"shown {StreamState.CATCHING_UP.value}": 3,
    f"shown {StreamState.RESYNCING.value}": 4,
    f"shown {StreamState.UNHASHABLE.value}": 2,
    f"shown {StreamState.DOWN.value}": 6,
}


# The faults after which the store lacks what was written last. Half of those that wait begin when something is written
# that is rarely lost.
LOSING = ("store_crash", "store_failover", "power")
# Half of those that wait begin when a worker was unregistered, as other routers still have to write then.
REFUSING = ("store_full", "store_stopped")


class Aim:
    """The states for which the faults of one world wait."""

    def __init__(
        self,
        loop: VirtualLoop,
        observer: Observer,
        written: Written,
        faults: Sequence[Fault],
        rng: random.Random,
        last_s: float,
    ) -> None:
        """Choose the states.

        Args:
            loop: The loop of the world.
            observer: Knows the states.
            written: Knows what was written just now.
            faults: The faults.
            rng: Chooses which faults wait, and for which state.
            last_s: How long after the beginning of the world the last fault begins.
        """
        self._loop, self._observer, self._written = loop, observer, written
        # The wait ends at a look, before the quiet end.
        self._latest_s = loop.time() + last_s - 2 * LOOK_S
        self._states = {fault.number: _state_for(fault, rng) for fault in faults if rng.random() < AIMED_SHARE}
        self._waiting: list[tuple[Fault, str, float, Callable[[], None]]] = []
        self._is_looking = False
        observer.on_step = partial(loop.after, 0.0, self._look)

    def begin(self, fault: Fault, call: Callable[[], None]) -> None:
        """Call `call` when the state of the fault has come."""
        state = self._states.get(fault.number)
        if state is None:
            call()
            return
        self._waiting.append((fault, state, min(self._loop.time() + MOST_WAIT_S, self._latest_s), call))
        self._look()
        self._look_soon()

    def _look_soon(self) -> None:
        if self._waiting and not self._is_looking:
            self._is_looking = True
            self._loop.after(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._is_looking = False
        self._look()
        self._look_soon()

    def _look(self) -> None:
        for waiting in list(self._waiting):
            fault, state, latest_s, call = waiting
            is_due = self._loop.time() >= latest_s or state in self._met(fault)
            if is_due and waiting in self._waiting:
                self._waiting.remove(waiting)
                call()

    def _met(self, fault: Fault) -> set[str]:
        return self._observer.met(fault.first, fault.second) | self._written.met()


def _state_for(fault: Fault, rng: random.Random) -> str:
    """Return a state for which a fault waits."""
    if fault.kind in LOSING and rng.random() < 0.5:
        return rng.choice(MOMENTS)
    if fault.kind in REFUSING and rng.random() < 0.5:
        return UNREGISTERED
    return rng.choices(list(RARE_STATES), list(RARE_STATES.values()))[0]
