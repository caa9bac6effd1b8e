# SPDX-License-Identifier: Apache-2.0
"""Claims: the engine patch costs a step of the scheduler some tens of microseconds and the engine's process some MB.

A reader that stops reading, a full queue and a snapshot under way cost the engine's step next to nothing more.

Both sides of every comparison take turns in one run, block by block, because the machine's speed changes by the minute.
The table has medians over the blocks, and median and quartiles of the ratios of neighbours. Each part defines its own
blocks. The script runs in the venv of the engine tests, which it enters by itself, and builds when it is missing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import engine_venv
from benchmarks.patch_comparison import Comparison, table
from benchmarks.report import Others, Result, finish, machine, parser_of, progress, save

PARTS = ("scheduler", "memory", "stuck", "full", "snapshots", "real")


def main() -> None:
    parser = parser_of(__doc__, quick=True, result=True)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    arguments = parser.parse_args()
    engine_venv.enter()
    # vLLM and the helpers of the engine tests exist only in that venv.
    from benchmarks import patch_parts
    from tests.engine.engine_config import write_model

    result: Result[Comparison] = Result("patch_overhead", arguments.quick, machine(), [], [])
    others = Others()
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as name:
        folder = Path(name)
        settings = patch_parts.Settings(arguments.quick, folder, write_model(folder / "model"))
        for part in arguments.only or PARTS:
            progress(f"patch_overhead: {part}")
            rows, notes = patch_parts.PARTS[part](settings)
            result.rows += rows
            result.notes += notes
            # Save after each part, so that an interrupted run leaves a result.
            save(result, arguments.json)
    result.notes.append(others.note())
    finish(result, arguments.json, table(result.rows))


if __name__ == "__main__":
    main()
