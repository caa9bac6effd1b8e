# SPDX-License-Identifier: Apache-2.0
"""This router beside its peers in one run.

The peers are dynamo.indexer, dynamo.select_service, vllm-router, and llm-d's layout in Valkey.

Every row alternates between the sides, on the same events and requests, after their answers were compared. A ratio
above one means that this router is ahead. The table is written to benchmarks/results/tables.md, and all rounds to
benchmarks/results/peers.json; --quick results are printed only. The peers' packages come from PyPI into environments
under $KVROUTER_CACHE (by default ~/.cache/hybrid-kv-router), built on first use; a peer that cannot be installed is
named in the table with the reason.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from benchmarks.peers import ingest, memory, proxy, query, selection, two_processes
from benchmarks.peers.packages import VERSIONS, Package, PeerSettings, environment
from benchmarks.peers.table import Findings, Group, PeerRow, page_part, table
from benchmarks.processes import ROOT
from benchmarks.report import TABLES, Others, machine, progress, scratch, write_part
from benchmarks.workload import SIX_GROUPS
from kvrouter.router.base.common.compiled import caution, wanted

MEASURES: dict[str, Callable[[PeerSettings], Findings]] = {
    "query": query.measure,
    "query-groups": partial(query.measure, groups=SIX_GROUPS),
    "select": selection.measure,
    "ingest": ingest.measure,
    "proxy": proxy.measure,
    "memory": memory.measure,
    "memory-many": memory.measure_many,
    "processes": two_processes.measure,
}
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
BEGIN = "<!-- table: written by make bench-peers -->"


def measure_group(name: str, quick: bool, packages: dict[str, Package]) -> Group:
    """Measure one group; if it fails, its only row says so."""
    others, load_before = Others(), os.getloadavg()[0]
    # /tmp instead of the system's temporary folder, as the path of the private store's socket must stay short.
    with scratch() as folder:
        settings = PeerSettings(quick, folder, packages["ai-dynamo-runtime"], packages["vllm-router"])
        try:
            findings = MEASURES[name](settings)
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".replace("|", "/").replace("\n", " ")[:200]
            findings = Findings([PeerRow(name, "", "", problem=reason)])
    about = machine() | {
        "compiled modules": "yes" if wanted() and caution() is None else "no",
        "peers": ", ".join(f"{package} {version}" for package, version in VERSIONS.items()),
    }
    about.pop("load before")
    load = f"load before {load_before:.1f}, at its end {os.getloadavg()[0]:.1f} (its own included)"
    return Group(about, findings.rows, [*findings.notes, f"{load}; {others.note()}"])


def failures(groups: dict[str, Group]) -> list[str]:
    return [name for name, group in groups.items() if any(not row.ours for row in group.rows)]


def stop(number: int, frame: FrameType | None) -> None:
    """End all processes that were started, by leaving their contexts."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="make bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small and short: shows that all work, not how fast")
    parser.add_argument("--only", choices=MEASURES, action="append", help="this one; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured, with all rounds, to FILE")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    packages = {name: environment(name) for name in VERSIONS}
    groups: dict[str, Group] = {}
    # The page shows all groups; groups that are not measured now keep their last measurement.
    earlier_groups = {}
    if not options.quick and RESULTS.exists():
        earlier_groups = msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, Group])
    for name in MEASURES:
        if options.only and name not in options.only:
            continue
        groups[name] = measure_group(name, options.quick, packages)
        progress(f"{table(groups[name].rows)}\n")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(groups)) + b"\n")
    if options.quick:
        print(page_part(groups))
    else:
        all_groups = {
            name: group for name in MEASURES if (group := groups.get(name) or earlier_groups.get(name)) is not None
        }
        part = page_part(all_groups)
        print(part)
        if not failures(groups):
            RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(all_groups)) + b"\n")
            write_part(TABLES, BEGIN, part)
    if names := failures(groups):
        raise SystemExit(f"failed: {', '.join(names)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
