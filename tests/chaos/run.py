# SPDX-License-Identifier: Apache-2.0
"""`make chaos`: random schedules of faults against the router, with every credited block checked.

    python -m tests.chaos.run [--seed N] [--schedules N] [--only KIND] [--at-once N] [--json FILE]

Exits 1 if a schedule credited a block wrongly or did not settle; the printed seed repeats that schedule.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import signal
import sys
import time
from pathlib import Path

import msgspec

from tests.chaos.harness.fleet import KINDS, run_all, schedule
from tests.chaos.harness.report import rows, table
from tests.chaos.harness.stage import Outcome

# Schedules mostly wait; this many of them keep two cores busy.
AT_ONCE = 8
SCHEDULES = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="the first seed; further schedules count up (default: by the clock)")
    parser.add_argument("--schedules", type=int, help=f"how many (default: {SCHEDULES}, or 1 with --seed)")
    parser.add_argument("--only", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help=f"side by side (default: {AT_ONCE})")
    parser.add_argument("--json", type=Path, help="where to write rows and outcomes")
    options = parser.parse_args()
    # Both signals end the started processes, even if a shell lets its background jobs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Log messages of a router under faults are expected, and the trace has its states.
    logging.disable(logging.CRITICAL)
    first = int(time.time()) if options.seed is None else options.seed
    count = options.schedules or (SCHEDULES if options.seed is None else 1)
    begun_s = time.monotonic()
    done: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        done.append(outcome)
        verdict = "WRONG" if outcome.failures else "right"
        print(
            f"{len(done):4}/{count}  seed {outcome.seed}  {outcome.fault:28}  {outcome.faults:2} faults  "
            f"{outcome.seconds:5.1f} s  {verdict}",
            flush=True,
        )
        if outcome.failures:
            print("\n".join(["", *outcome.failures, "", *outcome.trace, ""]), flush=True)
            print(f"repeat: python -m tests.chaos.run --seed {outcome.seed} --only {outcome.fault}\n", flush=True)

    print(f"{count} schedules from seed {first}", flush=True)
    interrupted = False
    try:
        schedules = [schedule(first + i, options.only) for i in range(count)]
        asyncio.run(run_all(schedules, at_once=options.at_once, done=tell))
    except KeyboardInterrupt:
        interrupted = True
    print(f"\n{table(done)}\n")
    wrong = [outcome for outcome in done if outcome.failures]
    print(
        f"{len(done)} schedules in {time.monotonic() - begun_s:.0f} s, {len(wrong)} wrong; {os.cpu_count()} cores, "
        f"{platform.machine()}, Python {platform.python_version()}"
    )
    if options.json is not None:
        report = {"first_seed": first, "rows": rows(done), "outcomes": done}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 130 if interrupted else int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
