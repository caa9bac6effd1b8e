# SPDX-License-Identifier: Apache-2.0
"""The summary of two sides that were measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.report import markdown, number, quartiles


class Comparison(msgspec.Struct):
    """One line of the table: medians, and the quartiles of the ratios."""

    what: str
    unit: str
    without: float
    with_: float = msgspec.field(name="with")
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    # The values of each side block by block, in the order in which they were taken.
    rounds: dict[str, list[float]] = {}


def compared(what: str, unit: str, without: Sequence[float], with_: Sequence[float]) -> Comparison:
    low, middle, high = quartiles(with_, without)
    rounds = {"without": list(without), "with": list(with_)}
    return Comparison(
        what,
        unit,
        statistics.median(without),
        statistics.median(with_),
        middle,
        (low, high),
        rounds,
    )


def table(rows: Sequence[Comparison]) -> str:
    lines = [("measured", "unit", "without", "with", "difference", "ratio", "quartiles")]
    for row in rows:
        shown = "" if row.quartiles is None else f"{row.quartiles[0]:.2f} to {row.quartiles[1]:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        difference = row.with_ - row.without
        signed = ("-" if difference < 0 else "+") + number(abs(difference))
        lines.append((row.what, row.unit, number(row.without), number(row.with_), signed, ratio, shown))
    return markdown(lines)
