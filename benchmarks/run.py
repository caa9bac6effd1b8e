# SPDX-License-Identifier: Apache-2.0
"""The benchmarks with goals of their own, one after another, and their table in benchmarks/results/tables.md.

Benchmarks that have a peer are measured beside it: `make bench-peers`. Results with all rounds go to
benchmarks/results; --quick results are printed only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.processes import ROOT
from benchmarks.report import TABLES, Result, Row, machine, parser_of, table, write_part

NAMES = ("match_in_process", "mirror_load")
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- table: written by make bench -->"


def page_part(results: list[Result[Row]], about: dict[str, str]) -> str:
    rows = [row for result in results for row in result.rows]
    lines = [table(rows), ""]
    lines += [f"- {note}" for result in results for note in result.notes]
    lines += ["", "Machine: " + "; ".join(f"{name}: {value}" for name, value in about.items()) + "."]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, quick=True)
    parser.add_argument("--only", choices=NAMES, action="append", help="this one; may be repeated")
    arguments = parser.parse_args()
    about = machine()
    failed = []
    results: dict[str, Result[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as quick:
        folder = Path(quick) if arguments.quick else RESULTS
        for name in NAMES:
            saved = folder / f"{name}.json"
            if arguments.only and name not in arguments.only:
                # The page shows all benchmarks; those that are not run now keep their last measurement.
                if saved.exists():
                    results[name] = msgspec.json.decode(saved.read_bytes(), type=Result[Row])
                continue
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(saved)]
            command += ["--quick"] if arguments.quick else []
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
            else:
                results[name] = msgspec.json.decode(saved.read_bytes(), type=Result[Row])
    part = page_part(list(results.values()), about)
    print(f"\n{part}")
    if not arguments.quick and not failed:
        write_part(TABLES, BEGIN, part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
