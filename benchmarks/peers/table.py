# SPDX-License-Identifier: Apache-2.0
"""One measured number beside a peer's, its goal, and the table of all. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import markdown, number

# The name under which every measurement keeps this router's values.
OURS = "kvrouter"
HEAD = ("measured", "unit", "kvrouter", "peer", "which", "ratio", "goal", "met")


class PeerRow(msgspec.Struct):
    """ours, theirs: one value a round, in the order in which they were taken. goal: the least ratio that is wanted.

    more: more is better (a rate), so that a ratio above one always says that this router is ahead. problem: why there
    are no values of the peer, or none at all."""

    what: str
    unit: str
    peer: str
    ours: list[float] = []
    theirs: list[float] = []
    goal: float | None = None
    more: bool = False
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """The peer's median through ours; for rates ours through the peer's. None where one is missing or not positive,
        as what a proxy adds can be in noise."""
        if not self.ours or not self.theirs:
            return None
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        if ours <= 0 or theirs <= 0:
            return None
        return ours / theirs if self.more else theirs / ours

    @property
    def met(self) -> bool | None:
        """None where there is no goal or nothing to compare with."""
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


class Group(msgspec.Struct):
    """What one name of `--only` measured. machine: what it depends on, load included."""

    machine: dict[str, str]
    rows: list[PeerRow]
    notes: list[str] = []


class Findings(msgspec.Struct):
    """What a module measured."""

    rows: list[PeerRow]
    notes: list[str] = []


def peer_row(
    what: str,
    unit: str,
    peer: str,
    values: Mapping[str, Sequence[float]],
    *,
    goal: float | None = None,
    more: bool = False,
    problem: str = "",
) -> PeerRow:
    """values: by the server's name, of each round."""
    return PeerRow(what, unit, peer, list(values.get(OURS, ())), list(values.get(peer, ())), goal, more, problem)


def latency_rows(
    what: str, peer: str, taken: Mapping[str, Sequence[NDArray[np.float64]]], *, goal: float, problem: str = ""
) -> list[PeerRow]:
    """p50, which has the goal, and p99. taken: by the server's name, for each round the time of every request in us."""
    rows = []
    for quantile in (50, 99):
        values = {name: [float(np.percentile(one, quantile)) for one in rounds] for name, rounds in taken.items()}
        wanted = goal if quantile == 50 else None
        rows.append(peer_row(f"{what}, p{quantile}", "us", peer, values, goal=wanted, problem=problem))
    return rows


def table(rows: Sequence[PeerRow]) -> str:
    """Markdown. A peer without values is named with the reason."""
    lines: list[Sequence[str]] = [HEAD]
    for row in rows:
        ours = number(statistics.median(row.ours)) if row.ours else "-"
        theirs = number(statistics.median(row.theirs)) if row.theirs else f"not measured: {row.problem or 'no values'}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else f"{row.goal:g}"
        met = "" if row.goal is None else {True: "yes", False: "**no**", None: "unknown"}[row.met]
        lines.append((row.what, row.unit, ours, theirs, row.peer, ratio, goal, met))
    return markdown(lines)


def page_part(groups: Mapping[str, Group]) -> str:
    """What stands between the markers of the page."""
    lines = [table([row for group in groups.values() for row in group.rows]), ""]
    lines += [f"- {name}: {note}" for name, group in groups.items() for note in group.notes]
    # Each machine once, with the names of what was measured on it.
    machines: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, group in groups.items():
        machines.setdefault(tuple(group.machine.items()), []).append(name)
    for machine, names in machines.items():
        about = "; ".join(f"{what}: {value}" for what, value in machine)
        lines += ["", f"Machine of {', '.join(names)}: {about}."]
    return "\n".join(lines)
