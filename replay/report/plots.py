# SPDX-License-Identifier: Apache-2.0
"""A comparison as pictures (PNG), drawn by matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrouter.replay.policies.names import OWN
from kvrouter.replay.runs.policy_run import PolicyRun, Summary
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.extras import install_command

SIZE_INCHES = (9.0, 4.5)
DOTS_PER_INCH = 120
OWN_COLOUR, OTHER_COLOUR = "#d95f02", "#7570b3"
# A slowest time of this many times the fastest needs a logarithmic axis, or one policy hides all others.
LOG_FROM = 50
NAMES = ("hit_tokens.png", "ttft.png", "balance.png")


def check_plots(folder: Path) -> None:
    """Check before hours of work that matplotlib is there and the folder can be written. Raises SettingError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingError(f"--plot needs matplotlib: {install_command('plots')}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write to --plot {folder}: {error.strerror}; name a folder") from None


def write_plots(folder: Path, runs: Sequence[PolicyRun]) -> list[Path]:
    """Draw reused tokens, times to first tokens, and the balance of load over time. Raises SettingError."""
    rows = [run.summary() for run in runs]
    paths = [folder / name for name in NAMES]
    try:
        _hit_tokens(paths[0], rows)
        _ttft(paths[1], rows)
        _balance(paths[2], runs)
    except OSError as error:
        raise SettingError(f"cannot write to --plot {folder}: {error.strerror}") from None
    return paths


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(axis="x" if title.startswith("Prompt") else "y", alpha=0.3)
    return figure, axes


def _hit_tokens(path: Path, rows: Sequence[Summary]) -> None:
    figure, axes = _figure("Prompt tokens reused")
    colours = [OWN_COLOUR if row.policy == OWN else OTHER_COLOUR for row in rows]
    bars = axes.barh([row.policy for row in rows], [row.reused_tokens / 1e6 for row in rows], color=colours)
    axes.bar_label(bars, [f"{row.reused_share:.1%}" for row in rows], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("million tokens (share of the prompts)")
    figure.savefig(path)


def _ttft(path: Path, rows: Sequence[Summary]) -> None:
    figure, axes = _figure("Time to first token")
    width = 0.27
    for place, (name, colour) in enumerate((("p50", "#1b9e77"), ("p95", "#7570b3"), ("p99", "#d95f02"))):
        values = [getattr(row, f"ttft_{name}_s") for row in rows]
        axes.bar([n + (place - 1) * width for n in range(len(rows))], values, width, label=name, color=colour)
    axes.set_xticks(range(len(rows)), [row.policy for row in rows], rotation=30, ha="right")
    axes.set_ylabel("seconds")
    slowest, fastest = max(row.ttft_p99_s for row in rows), min(row.ttft_p50_s for row in rows)
    if slowest > LOG_FROM * fastest > 0:
        axes.set_yscale("log")
    axes.legend()
    figure.savefig(path)


def _balance(path: Path, runs: Sequence[PolicyRun]) -> None:
    figure, axes = _figure("Requests at the busiest worker, by the mean of all workers")
    for run in runs:
        balance = run.load.balance()
        own = run.policy == OWN
        axes.plot(
            [time_s / 60 for time_s, _ in balance],
            [value for _, value in balance],
            label=run.policy,
            linewidth=2.2 if own else 1.0,
            color=OWN_COLOUR if own else None,
            zorder=3 if own else 2,
        )
    axes.set_xlabel("minutes of traffic")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path)
