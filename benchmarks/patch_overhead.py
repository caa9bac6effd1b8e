# SPDX-License-Identifier: Apache-2.0
"""Claims: the engine patch costs a step of the scheduler some tens of microseconds and the engine's process some MB; a reader that
stops reading, a full queue and a snapshot under way cost the engine's step next to nothing more.

Both sides of every comparison take turns in one run, block by block, because the machine's speed changes by the minute. The table
has medians over the blocks, and median and quartiles of the ratios of neighbours. What a block is, is said with each part.
Runs in the venv of the engine tests, which it enters by itself, and builds when it is missing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import engine_venv
import msgspec
from patch_comparison import Comparison, table
from report import machine, machine_cpu_s, own_cpu_s, progress

PARTS = ("scheduler", "memory", "stuck", "full", "snapshots", "real")


class Result(msgspec.Struct):
    """All lines of the script, as benchmarks/results/*.json have them."""

    name: str
    quick: bool
    machine: dict[str, str]
    rows: list[Comparison]
    notes: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, not how much it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, with all blocks, to FILE")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    arguments = parser.parse_args()
    engine_venv.enter()
    # Only there are vLLM and the helpers of the engine tests.
    import patch_parts
    from engine_config import write_model

    result = Result("patch_overhead", arguments.quick, machine(), [], [])
    start, busy, own = time.monotonic(), machine_cpu_s(), own_cpu_s()
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as name:
        folder = Path(name)
        settings = patch_parts.Settings(arguments.quick, folder, write_model(folder / "model"))
        for part in arguments.only or PARTS:
            progress(f"patch_overhead: {part}")
            rows, notes = patch_parts.PARTS[part](settings)
            result.rows += rows
            result.notes += notes
            if arguments.json:
                # After each part, so that an interrupted run has something.
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(msgspec.to_builtins(result), indent=1) + "\n")
    others = (machine_cpu_s() - busy - own_cpu_s() + own) / (time.monotonic() - start)
    result.notes.append(f"other processes of the machine used {max(0.0, others):.2f} cores meanwhile")
    if arguments.json:
        arguments.json.write_text(json.dumps(msgspec.to_builtins(result), indent=1) + "\n")
    print(table(result.rows))
    for note in result.notes:
        print(f"- {note}")


if __name__ == "__main__":
    main()
