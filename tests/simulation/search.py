# SPDX-License-Identifier: Apache-2.0
"""The search for a world with a broken law: worlds of rising seeds on all cores, each in a process of its own.

    python -m tests.simulation.search --hours 1 --seed 1     # search
    python -m tests.simulation.search --only 4711            # one world, with its history
    python -m tests.simulation.search --twice --worlds 1000  # each world also in a second interpreter

The end of a search shows which transitions, outcomes of leases, and pairs of a fault and a state were met
(`coverage.py`); `--json` writes them to a file. A broken law ends the search, unless `--go-on` is given: its seed, the few
faults that it takes, and the history of a world with these alone are printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

from tests.simulation import coverage
from tests.simulation.faults import FAULTS, Fault
from tests.simulation.twin import DIGEST, Twin, running
from tests.simulation.world import Outcome, run_world

# Lines of the history that are shown before the broken law, and how long one may be.
SHOWN_LINES = 60
SHOWN_CHARS = 220
# A world takes seconds; one that takes longer stands still within one step.
WORLD_TIMEOUT_S = 300.0
PROGRESS_S = 10.0


@dataclass
class Totals:
    """The work of a search so far."""

    began_s: float = field(default_factory=time.monotonic)
    worlds: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    judgements: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    coverage: coverage.Coverage = field(default_factory=coverage.Coverage)
    broken: list[tuple[int, str]] = field(default_factory=list)

    def add(self, outcome: Outcome, cpu_s: float) -> None:
        """Count a world."""
        self.worlds += 1
        self.simulated_s += outcome.simulated_s
        self.cpu_s += cpu_s
        self.steps += outcome.steps
        self.judgements += outcome.judgements
        self.faults.update(fault.kind for fault in outcome.faults)
        self.states.update(outcome.states)
        self.coverage.add(outcome.coverage)
        if outcome.problem:
            self.broken.append((outcome.seed, outcome.problem))

    def line(self) -> str:
        """Return the progress in one line."""
        speed = self.simulated_s / self.cpu_s if self.cpu_s else 0.0
        return (
            f"{time.monotonic() - self.began_s:.0f} s: {self.worlds} worlds, {self.simulated_s / 3600:.2f} simulated hours, "
            f"{self.faults.total()} faults, {self.steps} steps, {self.judgements} judgements, "
            f"{speed:.0f} simulated seconds per second of a core"
        )

    def table(self) -> Iterator[str]:
        """Yield the lines that a search ends with."""
        yield self.line()
        yield f"faults: {dict(sorted(self.faults.items()))}"
        yield f"judged answers by state: {dict(sorted(self.states.items()))}"
        yield from coverage.report(self.coverage, FAULTS)

    def as_json(self) -> bytes:
        """Return the same as JSON."""
        numbers = {
            "worlds": self.worlds,
            "simulated_s": round(self.simulated_s),
            "cpu_s": round(self.cpu_s, 1),
            "steps": self.steps,
            "judgements": self.judgements,
            "faults": dict(sorted(self.faults.items())),
            "answers": dict(sorted(self.states.items())),
            "broken": [{"seed": seed, "problem": problem} for seed, problem in self.broken],
        }
        return msgspec.json.format(msgspec.json.encode(numbers | coverage.as_json(self.coverage, FAULTS)))


class Child:
    """One world in a forked process, which ends without clean-up: what a killed router left must not run."""

    def __init__(self, seed: int, without: Collection[int] = (), twin: Twin | None = None) -> None:
        self.seed = seed
        self.began_s = time.monotonic()
        context = multiprocessing.get_context("fork")
        self.pipe, far = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(seed, without, twin, far), daemon=True)
        self._process.start()
        far.close()

    def result(self) -> tuple[Outcome, float]:
        """Return the outcome and the CPU seconds that it took."""
        try:
            outcome, cpu_s = self.pipe.recv()
        except EOFError:
            self._process.join()
            problem = f"the process of the world ended with code {self._process.exitcode}"
            return Outcome(self.seed, "", problem, 0.0, 0, 0), 0.0
        self._process.join()
        return outcome, cpu_s

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _work(seed: int, without: Collection[int], twin: Twin | None, pipe: Connection[Any, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before_s = time.process_time()
    outcome = run_world(seed, without)
    cpu_s = time.process_time() - before_s
    if twin is not None:
        twin.compare(outcome)
    if not outcome.problem:
        outcome.history = []
    pipe.send((outcome, cpu_s))
    pipe.close()
    os._exit(0)


def run_alone(seed: int, without: Collection[int] = (), twin: Twin | None = None) -> Outcome:
    """Run one world in a process of its own."""
    return Child(seed, without, twin).result()[0]


def search(
    seeds: Iterator[int],
    processes: int,
    until_s: float,
    totals: Totals,
    *,
    goes_on: bool = False,
    twin: Twin | None = None,
) -> list[Outcome]:
    """Run worlds until one breaks a law or the time is over; return the outcomes that broke one."""
    children: list[Child] = []
    broken: list[Outcome] = []
    shown_s = time.monotonic()
    try:
        while True:
            ends = time.monotonic() >= until_s or (broken and not goes_on)
            while not ends and len(children) < processes and (seed := next(seeds, None)) is not None:
                children.append(Child(seed, twin=twin))
            if not children or (broken and not goes_on):
                return broken
            readable = wait([child.pipe for child in children], timeout=1.0)
            for child in list(children):
                if child.pipe in readable:
                    outcome, cpu_s = child.result()
                    totals.add(outcome, cpu_s)
                elif time.monotonic() - child.began_s > WORLD_TIMEOUT_S:
                    child.end()
                    outcome = Outcome(child.seed, "", "stands still within one step", 0.0, 0, 0)
                else:
                    continue
                children.remove(child)
                if outcome.problem:
                    print(f"seed {outcome.seed}: {outcome.problem}", flush=True)
                    broken.append(outcome)
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                print(totals.line(), flush=True)
    finally:
        for child in children:
            child.end()


def law_of(outcome: Outcome) -> str:
    """Return the name of the broken law."""
    return outcome.problem.partition(":")[0]


def shrink(outcome: Outcome) -> tuple[list[Fault], Outcome]:
    """Leave out one fault after the other while the same law breaks; return the faults that are left."""
    without: set[int] = set()
    shortest = outcome
    for fault in reversed(outcome.faults):
        tried = run_alone(outcome.seed, without | {fault.number})
        if tried.problem and law_of(tried) == law_of(outcome):
            without.add(fault.number)
            shortest = tried
    return [fault for fault in outcome.faults if fault.number not in without], shortest


def report(outcome: Outcome) -> None:
    """Print what a broken law takes, and the history of it."""
    # Leaving faults out shows nothing about the order in which a process does things.
    faults, shortest = (outcome.faults, outcome) if law_of(outcome) == DIGEST else shrink(outcome)
    print(f"\nseed {outcome.seed} needs {len(faults)} of {len(outcome.faults)} faults:")
    for fault in faults:
        print(f"  {fault}")
    for line in shortest.history[-SHOWN_LINES:]:
        print(line[:SHOWN_CHARS])


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make simulate ARGS=...", description="Search for a fleet with a broken law.")
    parser.add_argument("--hours", type=float, default=0.05, help="how long to search, in hours of real time")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; by default from the clock")
    parser.add_argument(
        "--worlds", type=int, default=None, help="the most worlds; by default as many as there is time for"
    )
    parser.add_argument("--only", type=int, default=None, help="run the world of this seed and print its history")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many worlds run at once")
    parser.add_argument(
        "--go-on", action="store_true", help="list all seeds that break a law, instead of ending with one"
    )
    parser.add_argument(
        "--twice",
        action="store_true",
        help="run each world in a second interpreter, too, which must agree in every step",
    )
    parser.add_argument("--json", metavar="FILE", help="write what was met to this file, too")
    options = parser.parse_args(arguments)
    if options.only is not None:
        outcome = run_world(options.only)
        print("\n".join(outcome.history))
        print(f"digest {outcome.digest}: {outcome.problem or 'no law is broken'}", flush=True)
        # The remains of killed routers must not run.
        os._exit(bool(outcome.problem))
    first = int(time.time()) % 1_000_000_000 if options.seed is None else options.seed
    print(f"seeds from {first} on, {options.processes} at once", flush=True)
    seeds = iter(range(first, first + (options.worlds or sys.maxsize // 2)))
    totals = Totals()
    until_s = time.monotonic() + 3600 * options.hours
    try:
        with running() if options.twice else nullcontext() as twin:
            broken = search(seeds, options.processes, until_s, totals, goes_on=options.go_on, twin=twin)
    except KeyboardInterrupt:
        print("ended by Ctrl-C")
        broken = []
    print("\n".join(totals.table()))
    if options.json:
        Path(options.json).write_bytes(totals.as_json())
    if broken and not options.go_on:
        report(broken[0])
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
