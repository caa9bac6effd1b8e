# SPDX-License-Identifier: Apache-2.0
"""One measured number beside a peer's, its goal, and the table of all rows. Pure."""

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
    """One measurement of this router and a peer."""

    what: str
    unit: str
    peer: str
    # One value for each round, in the order in which they were taken.
    ours: list[float] = []
    theirs: list[float] = []
    # The least ratio that is wanted.
    goal: float | None = None
    # Whether more is better (a rate). The ratio takes this into account: above one, this router is ahead.
    more: bool = False
    # The reason if there are no values of the peer, or none at all.
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """The peer's median by ours; for rates ours by the peer's.

        It is None where one of them is missing or not positive, as the time that a proxy adds can be within noise.
        """
        if not self.ours or not self.theirs:
            return None
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        if ours <= 0 or theirs <= 0:
            return None
        return ours / theirs if self.more else theirs / ours

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is no goal or nothing to compare with."""
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


class Group(msgspec.Struct):
    """The measurements of one name of `--only`."""

    # The machine that the numbers depend on, load included.
    machine: dict[str, str]
    rows: list[PeerRow]
    notes: list[str] = []


class Findings(msgspec.Struct):
    """The measurements of one module."""

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
    """Return a row with the values of both sides.

    Args:
        what: The name of the measurement.
        unit: The unit of the values.
        peer: The peer's name.
        values: The values of each round by the server's name.
        goal: The least ratio that is wanted, or None.
        more: Whether more is better.
        problem: The reason if there are no values.
    """
    return PeerRow(what, unit, peer, list(values.get(OURS, ())), list(values.get(peer, ())), goal, more, problem)


def latency_rows(
    what: str, peer: str, taken: Mapping[str, Sequence[NDArray[np.float64]]], *, goal: float, problem: str = ""
) -> list[PeerRow]:
    """Return a row for p50, which has the goal, and one for p99.

    Args:
        what: The name of the measurement.
        peer: The peer's name.
        taken: By the server's name, the time of every request of each round in us.
        goal: The least ratio that is wanted.
        problem: The reason if there are no values.
    """
    rows = []
    for quantile in (50, 99):
        values = {
            name: [float(np.percentile(round_us, quantile)) for round_us in rounds] for name, rounds in taken.items()
        }
        wanted = goal if quantile == 50 else None
        rows.append(peer_row(f"{what}, p{quantile}", "us", peer, values, goal=wanted, problem=problem))
    return rows


def table(rows: Sequence[PeerRow]) -> str:
    """Return the rows as Markdown; a peer without values is named with the reason."""
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
    """Return the text between the markers of the page."""
    lines = [table([row for group in groups.values() for row in group.rows]), ""]
    lines += [f"- {name}: {note}" for name, group in groups.items() for note in group.notes]
    # Name each machine once, with the groups that were measured on it.
    machines: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, group in groups.items():
        machines.setdefault(tuple(group.machine.items()), []).append(name)
    for machine, names in machines.items():
        about = "; ".join(f"{what}: {value}" for what, value in machine)
        lines += ["", f"Machine of {', '.join(names)}: {about}."]
    return "\n".join(lines)
