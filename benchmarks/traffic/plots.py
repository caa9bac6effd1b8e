# SPDX-License-Identifier: Apache-2.0
"""A report as pictures (PNG): each shape's reuse beside its first tokens, and the distribution of both ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traffic.report import BAR, Report

SIZE_INCHES = (9.0, 4.5)
DOTS_PER_INCH = 120
COLOUR, LINE_COLOUR = "#d95f02", "#666666"


def write_plots(folder: Path, report: Report) -> list[Path]:
    """Draw a report and return the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "choice-shapes.png", folder / "choice-ratios.png"]
    verdicts = list(report.verdicts.values())
    ratios = {
        "reuse": [verdict.reuse for verdict in verdicts],
        "time to first token": [verdict.ttft for verdict in verdicts],
    }
    _scatter(paths[0], *ratios.values())
    _distributions(paths[1], ratios)
    return paths


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    return figure, figure.subplots(1, columns)


def _scatter(path: Path, reuse: Sequence[float], ttft: Sequence[float]) -> None:
    figure, axes = _figure(1)
    axes.scatter(reuse, ttft, s=12, color=COLOUR)
    axes.axvline(1, color=LINE_COLOUR, linewidth=0.8)
    axes.axhline(1, color=LINE_COLOUR, linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("reuse by the best peer's")
    axes.set_ylabel("time to first token: the best peer's by ours")
    axes.set_title("Each shape of traffic, each figure against its own best peer (up and right is better)")
    figure.savefig(path)


def _distributions(path: Path, ratios: Mapping[str, Sequence[float]]) -> None:
    figure, both = _figure(len(ratios))
    for axes, (name, values) in zip(both, ratios.items(), strict=True):
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(sorted(values), shares, color=COLOUR)
        axes.axvline(BAR, color=LINE_COLOUR, linewidth=0.8)
        axes.set_xlabel(f"{name}, by the best peer's")
        axes.set_ylabel("share of the shapes at most so good")
    both[-1].set_xscale("log")
    figure.savefig(path)
