# SPDX-License-Identifier: Apache-2.0
"""The faults of a world: what can happen, and the plan that a seed makes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MOST_LOST_WRITES = 40
# The share of worlds with only a few kinds of faults, and how many. Where all kinds are drawn, one that mends what another
# has damaged (a restart, a flush) nearly always follows (Groce et al., "Swarm Testing", ISSTA 2012).
FEW_KINDS_SHARE = 0.6
FEW_KINDS = (2, 8)
# The share of worlds whose faults come in bursts of a few seconds, and how many bursts there are.
BURSTS_SHARE = 0.4
BURSTS = (2, 6)
BURST_S = 4.0
# The numbers of faults of a sparse, a usual, a dense world, and of one in which hardly anything ends before the next
# begins. Sparse ones show how a single fault ends.
NUMBERS = ((1, 5), (10, 40), (40, 80), (80, 160))

# The faults and how often each is drawn.
FAULTS = {
    "engine_restart": 4,
    "engine_stopped": 2,
    "engine_mute": 2,
    "engine_slow": 2,
    "engine_flood": 2,
    "engine_idle": 3,
    "engine_unreported": 2,
    "engine_last_lost": 2,
    "router_kill": 4,
    "router_stop": 2,
    "router_pause": 3,
    "router_relay": 2,
    "power": 2,
    "store_crash": 2,
    "store_failover": 2,
    "store_flush": 2,
    "store_evicts": 2,
    "store_stopped": 2,
    "store_full": 2,
    "link_cut": 4,
    "link_reset": 2,
    "link_hang": 2,
    "network_slow": 2,
    "operator_rolling_restart": 2,
    "operator_surge": 2,
    "operator_drain": 2,
    "operator_move": 2,
    "operator_remove": 2,
    "operator_settings": 2,
}
# The changes that an operator makes to a worker.
TO_WORKERS = ("operator_drain", "operator_move", "operator_remove")


@dataclass(frozen=True)
class Fault:
    """One fault: when it begins, what it does to whom, and for how long."""

    number: int
    at_s: float
    kind: str
    first: str
    second: str
    seconds: float
    draw: float

    def __str__(self) -> str:
        whom = " ".join(filter(None, (self.first, self.second)))
        return f"fault {self.number}: {self.kind} {whom} at {self.at_s:.2f} s for {self.seconds:.2f} s"

    @property
    def lost_writes(self) -> int:
        """How many writes a crash of the store loses: those of up to a second or two."""
        return int(MOST_LOST_WRITES * self.draw**2)

    @property
    def loses_data(self) -> bool:
        """Whether the store loses something that was written."""
        return self.kind in (
            "power", "store_crash", "store_failover", "store_flush", "store_evicts", "engine_last_lost"
        )  # fmt: skip

    @property
    def disturbs_all(self) -> bool:
        """Whether the store, or the whole network, is disturbed."""
        return self.kind.startswith("store") or self.kind in ("power", "network_slow", "engine_last_lost")


def plan(
    rng: random.Random,
    routers: Sequence[str],
    servers: Sequence[str],
    engines: Sequence[str],
    clients: Sequence[str],
    from_s: float,
    to_s: float,
) -> list[Fault]:
    """Return the faults of a world in the order of their times.

    Args:
        rng: Decides everything.
        routers: The names of the routers.
        servers: The names of the hosts with engines.
        engines: The names of the engines.
        clients: The names of the hosts with clients that reach routers over HTTP.
        from_s: The time of the earliest fault.
        to_s: The time of the latest fault.
    """
    kinds = list(FAULTS)
    if rng.random() < FEW_KINDS_SHARE:
        kinds = rng.sample(kinds, rng.randint(*FEW_KINDS))
    faults: list[Fault] = []
    for at_s in _times(rng, from_s, to_s):
        kind = rng.choices(kinds, [FAULTS[kind] for kind in kinds])[0]
        first = second = ""
        if kind.startswith("engine"):
            first = rng.choice(servers)
        elif kind.startswith("router") or kind == "operator_settings":
            first = rng.choice(routers)
        elif kind.startswith("link"):
            first, second = rng.choice(routers), rng.choice([*servers, *clients, "store", "store"])
        elif kind in TO_WORKERS:
            first = rng.choice(engines)
        seconds = rng.choice((rng.uniform(0.05, 1.0), rng.uniform(0.5, 5.0), rng.uniform(2.0, 15.0)))
        faults.append(Fault(len(faults), at_s, kind, first, second, seconds, rng.random()))
    return faults


def _times(rng: random.Random, from_s: float, to_s: float) -> list[float]:
    """Return the times of the faults of a world, in order."""
    number = rng.randint(*rng.choice(NUMBERS))
    if rng.random() >= BURSTS_SHARE:
        return sorted(rng.uniform(from_s, to_s) for _ in range(number))
    begins_s = [rng.uniform(from_s, to_s - BURST_S) for _ in range(rng.randint(*BURSTS))]
    return sorted(rng.choice(begins_s) + rng.uniform(0.0, BURST_S) for _ in range(number))
