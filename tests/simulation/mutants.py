# SPDX-License-Identifier: Apache-2.0
"""The search for the faults of `mutations.py`: can the simulation find each, and how long does it take?

python -m tests.simulation.mutants                     # all, each in a process of its own
python -m tests.simulation.mutants no_fence others     # only some
"""

from __future__ import annotations

import argparse
import os
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
    seconds: float

    def line(self) -> str:
        """Return the finding in one line."""
        if self.seed is None:
            return f"{self.name}: not found in {self.seconds:.0f} s"
        return f"{self.name}: seed {self.seed} after {self.seconds:.0f} s: {self.problem[:150]}"


def find_here(name: str, first_seed: int, worlds: int) -> Found:
    """Put the fault into this process's product, and search worlds until one breaks a law."""
    put_in(name)
    # Only now, because the product must not be imported before the fault is put in.
    from tests.simulation.search import Totals, search

    began_s = time.monotonic()
    broken = search(iter(range(first_seed, first_seed + worlds)), os.cpu_count() or 1, began_s + 3600.0, Totals())
    seconds = time.monotonic() - began_s
    return Found(name, broken[0].seed, broken[0].problem, seconds) if broken else Found(name, None, "", seconds)


def find(name: str, first_seed: int = 1, worlds: int = MOST_WORLDS) -> Found:
    """Search for a fault in a process of its own."""
    command = [sys.executable, "-m", "tests.simulation.mutants", "--here", "--seed", str(first_seed)]
    process = subprocess.run([*command, "--worlds", str(worlds), name], stdout=subprocess.PIPE, text=True, check=True)
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
    parser.add_argument("--json", metavar="FILE", help="write the findings there, too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"there is no fault {', '.join(unknown)}; there are: {', '.join(names)}")
    if options.here:
        print(msgspec.json.encode(find_here(options.names[0], options.seed, options.worlds)).decode())
        return 0
    findings: list[Found] = []
    for name in options.names or names:
        findings.append(find(name, options.seed, options.worlds))
        print(findings[-1].line(), flush=True)
    found_s = [finding.seconds for finding in findings if finding.seed is not None]
    median = f", the median after {statistics.median(found_s):.0f} s" if found_s else ""
    print(f"{len(found_s)} of {len(findings)} found{median}")
    if options.json:
        Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(findings)))
    return len(found_s) < len(findings)


if __name__ == "__main__":
    sys.exit(main())
