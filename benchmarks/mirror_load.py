# SPDX-License-Identifier: Apache-2.0
"""Claim: a router that starts on an existing store of 10^6 entries has its mirror loaded within a second.

The time is that of `Core.start` in a fresh core, with 16 workers in a private Valkey that has its data in memory. The
time to start Python and Valkey is not included.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.filling import answer, fill_ours, make_load
from benchmarks.processes import child
from benchmarks.report import Row, Settings, below, median_row, progress, run

GOAL_S = 1.0


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    rounds = settings.pick(7, 2)
    progress("mirror load: filling the store")
    load = make_load(settings.folder, settings.pick(1_000_000, 60_000))
    fill_ours(settings.folder, load)
    command = [
        sys.executable,
        "-m",
        "benchmarks.our_process",
        "load",
        str(settings.folder / "data"),
        "--rounds",
        str(rounds),
    ]
    seconds = []
    log = settings.folder / "load.log"
    with child(command, log, stdout=subprocess.PIPE) as process:
        for _ in range(rounds):
            loaded = answer(process, log)
            if loaded["entries"] != load.entries:
                raise AssertionError(f"{loaded['entries']} entries were loaded, {load.entries} are stored")
            seconds.append(loaded["seconds"])
        process.wait(60)
    row = median_row(
        f"mirror load at start, {load.entries:,} entries",
        "s",
        seconds,
        goal=f"at most {GOAL_S:.0f}",
        wanted=below(GOAL_S),
    )
    return [row], []


if __name__ == "__main__":
    run("mirror_load", __doc__, measure)
