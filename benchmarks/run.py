# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, one after another, and the table of docs/reference/benchmarks.md.

dynamo runs from an environment of its own outside the clone ($KVROUTER_CACHE, by default ~/.cache/hybrid-kv-router),
which is built when it is missing. Results with all rounds go to benchmarks/results; --quick ones are printed only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from processes import HERE
from report import DYNAMO_VERSION, Result, Row, dynamo_folder, machine, progress, table

NAMES = ("match_in_process", "query_http", "ingest", "memory", "mirror_load")
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "reference" / "benchmarks.md"
BEGIN, END = "<!-- table: written by make bench -->", "<!-- end of table -->"


def dynamo_python() -> Path:
    """The python with dynamo, in an environment built on first use."""
    folder = dynamo_folder()
    python = folder / "bin" / "python"
    if python.exists():
        return python
    progress(f"building {folder}")
    # Built under another name, so that an interrupted build is never taken for a whole one; venvs work after a rename
    # as long as they are called by their python.
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(building)], check=True)
    pip = [str(building / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"ai-dynamo-runtime=={DYNAMO_VERSION}"], check=True)
    building.rename(folder)
    return python


def page_part(results: list[Result[Row]], about: dict[str, str]) -> str:
    rows = [row for result in results for row in result.rows]
    lines = [table(rows), ""]
    lines += [f"- {note}" for result in results for note in result.notes]
    lines += ["", "Machine: " + "; ".join(f"{name}: {value}" for name, value in about.items()) + "."]
    return "\n".join(lines)


def write_page(part: str) -> None:
    """Replaces what stands between the markers of docs/reference/benchmarks.md."""
    text = PAGE.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN!r} and {END!r}")
    PAGE.write_text(f"{head}{BEGIN}\n\n{part}\n\n{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that all work, not how fast")
    parser.add_argument("--only", choices=NAMES, action="append", help="this one; may be repeated")
    parser.add_argument(
        "--dynamo-python", type=Path, help="a python that has ai-dynamo-runtime, instead of the built one"
    )
    parser.add_argument("--no-dynamo", action="store_true", help="measure ours alone")
    arguments = parser.parse_args()
    python = None if arguments.no_dynamo else arguments.dynamo_python or dynamo_python()
    about = machine()
    failed = []
    results: dict[str, Result[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as quick:
        folder = Path(quick) if arguments.quick else RESULTS
        for name in NAMES:
            saved = folder / f"{name}.json"
            if arguments.only and name not in arguments.only:
                # The page shows all; what is not measured now keeps its last measurement.
                if saved.exists():
                    results[name] = msgspec.json.decode(saved.read_bytes(), type=Result[Row])
                continue
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(saved)]
            command += ["--quick"] if arguments.quick else []
            command += ["--dynamo-python", str(python)] if python else []
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
            else:
                results[name] = msgspec.json.decode(saved.read_bytes(), type=Result[Row])
    part = page_part(list(results.values()), about)
    print(f"\n{part}")
    if not arguments.quick and not arguments.no_dynamo and not failed:
        write_page(part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
