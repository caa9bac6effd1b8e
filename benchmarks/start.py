# SPDX-License-Identifier: Apache-2.0
"""Claim: a router answers within a second, and a wrong setting is refused within half of one.

CPU time is that of the command and its children, the private store included, until the first answer of /health or the
end of the command. Each round starts every command once; the first start, which reads all files from the disk, is not
counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import cpu_s
from benchmarks.report import machine, markdown, parser_of, scratch
from tests.support.router_process import RouterProcess

KVROUTER = [sys.executable, "-m", "kvrouter.router.cli"]
# Commands that end by themselves: the name, the arguments and the exit code.
ENDING = (
    ("kvrouter --help", ("--help",), 0),
    ("kvrouter serve --help", ("serve", "--help"), 0),
    ("a refused port", ("serve", "--port", "x"), 2),
    ("a refused Redis URL", ("serve", "--redis", "redis://h/0?color=red"), 2),
)
START = "start to the first answer"


def started(folder: Path) -> tuple[float, float]:
    """Start a router and return the CPU and wall time until /health answers, in seconds."""
    begun_s = time.perf_counter()
    with RouterProcess(folder) as router:
        return cpu_s(router.pid), time.perf_counter() - begun_s


def ended(arguments: tuple[str, ...], code: int) -> tuple[float, float]:
    """Run a command that ends by itself and return its CPU and wall time, in seconds."""
    begun_s = time.perf_counter()
    process = subprocess.Popen([*KVROUTER, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise RuntimeError(f"kvrouter {' '.join(arguments)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - begun_s


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU and wall time of each round by the command's name."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (START, *(name for name, _, _ in ENDING))}
    with scratch() as folder:
        started(folder / "first")
        for number in range(rounds):
            times[START].append(started(folder / str(number)))
            for name, arguments, code in ENDING:
                times[name].append(ended(arguments, code))
    return times


if __name__ == "__main__":
    parser = parser_of(__doc__, result=True)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    taken = measure(given.rounds)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rounds": taken}, indent=1))
    rows = [
        [name, *(f"{statistics.median(times):.2f}" for times in zip(*rounds, strict=True))]
        for name, rounds in taken.items()
    ]
    print(f"medians of {given.rounds} rounds, s; {machine()}\n")
    print(markdown([["command", "CPU", "wall"], *rows]))
