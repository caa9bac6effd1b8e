# SPDX-License-Identifier: Apache-2.0
"""What two sides of a comparison measured in turns add up to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from report import number


class Comparison(msgspec.Struct):
    """One line: medians, and the quartiles of the ratios. rounds: block by block, in the order in which they were taken."""

    what: str
    unit: str
    without: float
    with_: float = msgspec.field(name="with")
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    rounds: dict[str, list[float]] = {}


def compared(what: str, unit: str, without: Sequence[float], with_: Sequence[float]) -> Comparison:
    ratios = [b / a for a, b in zip(without, with_, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    rounds = {"without": list(without), "with": list(with_)}
    return Comparison(
        what,
        unit,
        statistics.median(without),
        statistics.median(with_),
        statistics.median(ratios),
        (quartiles[0], quartiles[2]),
        rounds,
    )


def table(rows: Sequence[Comparison]) -> str:
    """Markdown, which a terminal shows well enough."""
    lines = [("measured", "unit", "without", "with", "difference", "ratio", "quartiles"), ("---",) * 7]
    for row in rows:
        quartiles = "" if row.quartiles is None else f"{row.quartiles[0]:.2f} to {row.quartiles[1]:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        difference = row.with_ - row.without
        shown = ("-" if difference < 0 else "+") + number(abs(difference))
        lines.append((row.what, row.unit, number(row.without), number(row.with_), shown, ratio, quartiles))
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width, '-' if cell == '---' else ' ') for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )
