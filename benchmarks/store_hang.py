# SPDX-License-Identifier: Apache-2.0
"""Claim: while Redis hangs for 30 s under traffic, no router credits in `live` what the engine does not hold.

Three router processes run on one Valkey. Simulated engines under load store and evict all the time and record their
holdings after each message (the engines of the chaos harness). Valkey gets a SIGSTOP, and after 30 s a SIGCONT. Each
router's answers are judged all the time, those of the worker's follower separately from those of the other two: against
the engine's holdings at the `seq` that the answer shows, and against all its holdings within the last two seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import parser_of
from tests.chaos.harness.engines import Engine
from tests.chaos.harness.history import Life
from tests.chaos.harness.process_router import ProcessRouter
from tests.chaos.harness.process_schedule import STORE_HANGS, ProcessSchedule, _true_hit
from tests.chaos.harness.scene import Scene
from tests.chaos.harness.stage import LIVE

RESULTS = Path(__file__).parent / "results" / "store_hang.json"
HANG_S = 30.0
# The age that an answer with the state `live` may have from a router that does not follow the worker.
BEHIND_S = 2.0
FOLLOWER, OTHER = "follows the worker", "does not"


@dataclass
class Role:
    """The answers of the routers in one role while the store hung. Times are in seconds after the stop or its end."""

    looks: int = 0
    live: int = 0
    # Live answers above the engine's holdings at the shown seq, and above all holdings of the last BEHIND_S.
    over_at_seq: int = 0
    over_recent: int = 0
    # The first `suspect` and the first lack of credit of each router and worker, after the stop.
    suspect_from_s: list[float] = field(default_factory=list)
    uncredited_from_s: list[float] = field(default_factory=list)
    # The first credited live answer of each router and worker that was `suspect`, after the end.
    live_again_s: list[float] = field(default_factory=list)


class Hang(ProcessSchedule):
    """A schedule with one hang of the store."""

    def __init__(self, seed: int, hang_s: float) -> None:
        super().__init__(seed, STORE_HANGS)
        self._hang_s = hang_s
        self._stopped_s: float | None = None
        self._resumed_s: float | None = None
        self._followers: dict[str, str] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self.roles = {FOLLOWER: Role(), OTHER: Role()}

    async def _act(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        if self._stopped_s is not None:
            return
        for router in routers:
            for name, row in (await router.rows()).items():
                # Only the router that follows a worker knows when it last heard from it.
                if row["last_event_age_s"] is not None:
                    self._followers[name] = router.name
        self.outcome.faults += 1
        self._valkey.stop()
        self._stopped_s = time.monotonic()
        await asyncio.sleep(self._hang_s)
        self._valkey.go_on()
        self._resumed_s = time.monotonic()

    def _look(
        self,
        router: ProcessRouter,
        engine: Engine,
        tokens: list[int],
        before: dict[str, Any],
        hit: int,
        after: dict[str, Any],
    ) -> None:
        super()._look(router, engine, tokens, before, hit, after)
        if self._stopped_s is None:
            return
        now = time.monotonic()
        role = self.roles[FOLLOWER if self._followers.get(engine.name) == router.name else OTHER]

        def first(what: str) -> bool:
            key = (router.name, engine.name, what)
            new = key not in self._seen
            self._seen.add(key)
            return new

        if self._resumed_s is not None:
            doubted = (router.name, engine.name, "suspect") in self._seen
            if doubted and after["state"] in LIVE and after["credited"] and first("again"):
                role.live_again_s.append(now - self._resumed_s)
            return
        role.looks += 1
        if after["state"] == "suspect" and first("suspect"):
            role.suspect_from_s.append(now - self._stopped_s)
        if not after["credited"] and first("uncredited"):
            role.uncredited_from_s.append(now - self._stopped_s)
        if not (before["state"] == after["state"] == "live"):
            return
        role.live += 1
        at_seq = [
            holdings
            for life in engine.history.current
            for seq in range(before["seq"] or 0, (after["seq"] or 0) + 1)
            if (holdings := life.at(seq)) is not None
        ]
        role.over_at_seq += hit > max((_true_hit(engine, holdings, tokens) for holdings in at_seq), default=0)
        recent = [holdings for life in engine.history.current for holdings in _recent(life, now - BEHIND_S)]
        role.over_recent += hit > max((_true_hit(engine, holdings, tokens) for holdings in recent), default=0)


def _recent(life: Life, since_s: float) -> Iterable[Any]:
    """Return the engine's holdings at every moment since a time."""
    first = max((number for number, said_s in enumerate(life.said_s) if said_s <= since_s), default=0)
    return life.states[first:]


def _span(times: list[float]) -> str:
    return f"{min(times):.1f} to {max(times):.1f} s ({len(times)})" if times else "never"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hang-s", type=float, default=HANG_S)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    total = {FOLLOWER: Role(), OTHER: Role()}
    failures: list[str] = []
    for number in range(arguments.rounds):
        hang = Hang(arguments.seed + number, arguments.hang_s)
        asyncio.run(hang.run())
        failures += hang.outcome.failures
        for name, role in hang.roles.items():
            for key, value in asdict(role).items():
                setattr(total[name], key, getattr(total[name], key) + value)
    print(
        "| a router that | answers judged | of them live | over-credited, at the shown seq | over all held in 2 s "
        "| suspect, after the stop | without credit | live again, after the end |\n|---|---|---|---|---|---|---|---|"
    )
    for name, role in total.items():
        print(
            f"| {name} | {role.looks:,} | {role.live:,} | {role.over_at_seq} | {role.over_recent} | {_span(role.suspect_from_s)} | "
            f"{_span(role.uncredited_from_s)} | {_span(role.live_again_s)} |"
        )
    print("\n".join(failures))
    result = {
        "hang_s": arguments.hang_s,
        "rounds": arguments.rounds,
        "roles": {name: asdict(role) for name, role in total.items()},
        "failures": failures,
        "machine": f"{os.cpu_count()} cores",
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    wrong = sum(role.over_at_seq + role.over_recent for role in total.values())
    sys.exit(f"{wrong} answers over-credit in live, {len(failures)} failures" if wrong or failures else 0)


if __name__ == "__main__":
    main()
