# SPDX-License-Identifier: Apache-2.0
"""A report as pictures (PNG): each shape's reuse beside its first tokens, and both distributions for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.traffic.report import BAR, Report

SIZE_INCHES = (9.0, 4.5)
DOTS_PER_INCH = 120
LINE_COLOUR, PEER_COLOUR, OWN_COLOUR = "#666666", "#9aa5b1", "#d95f02"
# Marks keep the picture readable for people who cannot tell the colours apart.
PACE_COLOURS = {"idle": "#1b9e77", "busy": "#d95f02", "burst": "#7570b3", "saturated": "#222222"}
PACE_MARKS = {"idle": "o", "busy": "^", "burst": "s", "saturated": "x"}
# The part of each axis on which nearly all shapes lie, and the labels on it. A shape beyond it is drawn at the edge.
REUSE_RANGE, TTFT_RANGE = (0.4, 1.2), (0.3, 2.5)
TTFT_TICKS = (0.3, 0.5, 0.7, 1.0, 1.4, 2.0)


def write_plots(folder: Path, report: Report) -> list[Path]:
    """Draw a report and return the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "choice-shapes.png", folder / "choice-ratios.png"]
    _scatter(paths[0], report)
    _distributions(paths[1], report)
    return paths


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    return figure, figure.subplots(1, columns)


def _scatter(path: Path, report: Report) -> None:
    figure, axes = _figure(1)
    for pace, colour in PACE_COLOURS.items():
        verdicts = [verdict for name, verdict in report.verdicts.items() if report.paces[name] == pace]
        axes.scatter(
            [_within(verdict.reuse, REUSE_RANGE) for verdict in verdicts],
            [_within(verdict.ttft, TTFT_RANGE) for verdict in verdicts],
            s=14,
            color=colour,
            marker=PACE_MARKS[pace],
            label=f"{pace} ({len(verdicts)})",
        )
    axes.axvline(1, color=LINE_COLOUR, linewidth=0.8)
    axes.axhline(1, color=LINE_COLOUR, linewidth=0.8)
    _ttft_scale(axes.set_yscale, axes.set_ylim, axes.set_yticks)
    axes.set_xlabel("our reuse by the best peer's")
    axes.set_ylabel("the best peer's time to first token by ours")
    axes.set_title("Each shape of traffic, each figure beside its own best peer: up and right is better")
    axes.legend()
    figure.savefig(path)


def _distributions(path: Path, report: Report) -> None:
    figure, (left, right) = _figure(2)
    _steps(left, report.own, report.reuse_ratios, REUSE_RANGE)
    left.set_xlim(*REUSE_RANGE)
    left.set_xlabel("reuse by the best peer's")
    left.set_ylabel("share of the shapes, at most this good")
    _steps(right, report.own, report.ttft_ratios, TTFT_RANGE)
    _ttft_scale(right.set_xscale, right.set_xlim, right.set_xticks)
    right.set_xlabel("the best peer's time to first token by the policy's")
    right.legend(loc="upper left")
    figure.suptitle("Each policy beside the best peer of each shape: further right is better")
    figure.savefig(path)


def _steps(axes: Any, own: str, ratios: Mapping[str, Sequence[float]], limits: tuple[float, float]) -> None:
    # The legend names one of the peers for all of them.
    labels = {own: "kv", next(policy for policy in ratios if policy != own): "a peer"}
    for policy, values in ratios.items():
        shares = [(place + 1) / len(values) for place in range(len(values))]
        is_own = policy == own
        axes.step(
            sorted(_within(value, limits) for value in values),
            shares,
            color=OWN_COLOUR if is_own else PEER_COLOUR,
            linewidth=2.2 if is_own else 0.9,
            label=labels.get(policy),
        )
    axes.axvline(BAR, color=LINE_COLOUR, linewidth=0.8)


def _ttft_scale(set_scale: Any, set_limits: Any, set_ticks: Any) -> None:
    set_scale("log")
    set_limits(*TTFT_RANGE)
    set_ticks(TTFT_TICKS, [f"{tick:g}" for tick in TTFT_TICKS])
    set_ticks([], minor=True)


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
