# SPDX-License-Identifier: Apache-2.0
"""The search for the faults of `mutations.py`: can the simulation find each, and how long does it take?

python -m tests.simulation.mutants                     # all, each in a process of its own
python -m tests.simulation.mutants no_fence others     # only some
python -m tests.simulation.mutants --sample 24         # some, chosen by the seed
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.simulation.mutations import MUTATIONS, put_in

# The faults of this many worlds; a fault that none of them shows counts as not found.
MOST_WORLDS = 60


class Found(msgspec.Struct):
    """The result of a search with one fault in the product."""

    name: str
    # The seed of the world that broke a law, and the law; None and "" if none did.
    seed: int | None
    problem: str
    # The worlds that were searched, the simulated seconds of them all, and the seconds that this took.
    worlds: int
    simulated_s: float
    seconds: float

    def line(self) -> str:
        """Return the finding in one line."""
        work = f"{self.worlds} worlds, {self.simulated_s:.0f} simulated s, {self.seconds:.0f} s"
        return f"{self.name}: {'not found' if self.seed is None else f'seed {self.seed}'}, {work}: {self.problem[:150]}"


def find_here(name: str, first_seed: int, worlds: int, processes: int) -> Found:
    """Put the fault into this process's product, and search worlds until one breaks a law."""
    put_in(name)
    # Only now, because the product must not be imported before the fault is put in.
    from tests.simulation.search import Totals, search

    began_s = time.monotonic()
    totals = Totals()
    broken = search(iter(range(first_seed, first_seed + worlds)), processes, began_s + 3600.0, totals)
    seed, problem = (broken[0].seed, broken[0].problem) if broken else (None, "")
    return Found(name, seed, problem, totals.worlds, totals.simulated_s, time.monotonic() - began_s)


def find(name: str, first_seed: int = 1, worlds: int = MOST_WORLDS, processes: int = 1) -> Found:
    """Search for a fault in a process of its own."""
    numbers = ("--seed", str(first_seed), "--worlds", str(worlds), "--processes", str(processes))
    command = [sys.executable, "-m", "tests.simulation.mutants", "--here", *numbers, name]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return msgspec.json.decode(process.stdout.splitlines()[-1], type=Found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for faults, and return 1 if one was not found."""
    parser = argparse.ArgumentParser(
        prog="make simulate-mutants ARGS=...", description="Search for faults that are put into the product."
    )
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--worlds", type=int, default=MOST_WORLDS, help="the most worlds for a fault")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of the faults, chosen by the seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many worlds run at once")
    parser.add_argument("--json", metavar="FILE", help="write the findings there, too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"there is no fault {', '.join(unknown)}; there are: {', '.join(names)}")
    if options.here:
        found_here = find_here(options.names[0], options.seed, options.worlds, options.processes)
        print(msgspec.json.encode(found_here).decode())
        return 0
    names = options.names or names
    findings: list[Found] = []
    for name in random.Random(options.seed).sample(names, min(options.sample or len(names), len(names))):
        findings.append(find(name, options.seed, options.worlds, options.processes))
        print(findings[-1].line(), flush=True)
        if options.json:
            Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(findings)))
    found = [finding for finding in findings if finding.seed is not None]
    print(f"{len(found)} of {len(findings)} found", end="")
    if found:
        worlds = statistics.median(finding.worlds for finding in found)
        simulated_s = statistics.median(finding.simulated_s for finding in found)
        print(f", the median in {worlds:.0f} worlds and {simulated_s:.0f} simulated s", end="")
    print()
    return len(found) < len(findings)


if __name__ == "__main__":
    sys.exit(main())
