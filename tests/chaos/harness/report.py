# SPDX-License-Identifier: Apache-2.0
"""The outcomes of many schedules as rows by kind of fault, and as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.chaos.harness.shape import Kind
from tests.chaos.harness.stage import LIVE, Outcome

HEAD = (
    "| fault | schedules | faults | samples | live but behind | ghosts while live | ghosts while marked | ghosts after "
    "| lost after: stock | plain | patched | recovered p50 | p99 |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return one row for each kind of fault, and one for all.

    Times are in seconds. Blocks during a fault are counted once for each sample.
    """
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.fault, []).append(outcome)
    fault_rows = [_row(name, fault_outcomes) for name, fault_outcomes in sorted(by_fault.items())]
    return [*fault_rows, _row("all", [outcome for fault_outcomes in by_fault.values() for outcome in fault_outcomes])]


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEAD]
    for row in rows(outcomes):
        marked = ", ".join(f"{count} {state}" for state, count in sorted(row["ghosts_marked"].items())) or 0
        lost = [row["lost_after"].get(kind.value, 0) for kind in Kind]
        times = ["-" if row[name] is None else f"{row[name]:.2f} s" for name in ("p50_s", "p99_s")]
        counts = [row[name] for name in ("fault", "schedules", "faults", "samples", "behind", "ghosts_live")]
        lines.append(f"| {' | '.join(map(str, [*counts, marked, row['ghosts_after'], *lost, *times]))} |")
    return "\n".join(lines)


def _row(name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    during: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for outcome in outcomes:
        during += outcome.ghosts_during
        lost += outcome.lost_after
    times = sorted(seconds for outcome in outcomes for seconds in outcome.recovered_s)
    return {
        "fault": name,
        "schedules": len(outcomes),
        "failed": sum(bool(outcome.failures) for outcome in outcomes),
        "faults": sum(outcome.faults for outcome in outcomes),
        "samples": sum(outcome.samples for outcome in outcomes),
        "behind": sum(outcome.behind for outcome in outcomes),
        "ghosts_live": sum(count for state, count in during.items() if state in LIVE),
        "ghosts_marked": {state: count for state, count in during.items() if state not in LIVE},
        "ghosts_after": sum(outcome.ghosts_after for outcome in outcomes),
        "lost_after": dict(lost),
        "p50_s": _at(times, 0.50),
        "p99_s": _at(times, 0.99),
    }


def _at(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
