# SPDX-License-Identifier: Apache-2.0
"""A report as pictures (PNG): each shape's reuse beside its first tokens, and the distribution of both ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traffic.outcome import Verdict
from traffic.report import BAR, Report

SIZE_INCHES = (9.0, 4.5)
DOTS_PER_INCH = 120
COLOUR, OTHER_COLOUR, LINE_COLOUR = "#d95f02", "#7570b3", "#666666"


def write_plots(folder: Path, report: Report, former: Report | None = None) -> list[Path]:
    """Draw a report. former: of the policy before, drawn beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "choice-shapes.png", folder / "choice-ratios.png"]
    series = [(report.own, COLOUR, list(report.verdicts.values()))]
    if former is not None:
        series.insert(0, (former.own, OTHER_COLOUR, list(former.verdicts.values())))
    _scatter(paths[0], series)
    _distributions(paths[1], series)
    return paths


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    return figure, figure.subplots(1, columns)


def _scatter(path: Path, series: Sequence[tuple[str, str, Sequence[Verdict]]]) -> None:
    figure, axes = _figure(1)
    for name, colour, verdicts in series:
        axes.scatter([one.reuse for one in verdicts], [one.ttft for one in verdicts], s=12, color=colour, label=name)
    axes.axvline(1, color=LINE_COLOUR, linewidth=0.8)
    axes.axhline(1, color=LINE_COLOUR, linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("reuse by the best peer's")
    axes.set_ylabel("time to first token: the best peer's by ours")
    axes.set_title("Each shape of traffic, each figure against its own best peer (up and right is better)")
    axes.legend()
    figure.savefig(path)


def _distributions(path: Path, series: Sequence[tuple[str, str, Sequence[Verdict]]]) -> None:
    figure, (left, right) = _figure(2)
    for axes, title, of in ((left, "reuse", _reuse), (right, "time to first token", _ttft)):
        for name, colour, verdicts in series:
            values = sorted(map(of, verdicts))
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, color=colour, label=name)
        axes.axvline(BAR, color=LINE_COLOUR, linewidth=0.8)
        axes.set_xlabel(f"{title}, by the best peer's")
        axes.set_ylabel("share of the shapes at most so good")
        axes.legend()
    right.set_xscale("log")
    figure.savefig(path)


def _reuse(verdict: Verdict) -> float:
    return verdict.reuse


def _ttft(verdict: Verdict) -> float:
    return verdict.ttft
