# SPDX-License-Identifier: Apache-2.0
"""Verdicts over many shapes, by class, as values and as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.traffic.outcome import (
    ENDLESS,
    POOLED,
    Outcome,
    Verdict,
    geometric_mean,
    mean,
    reuse_ratio,
    ttft_ratio,
    verdict,
)
from benchmarks.traffic.shape import Shape, classes, draw, draw_rotation

# A ratio below this counts as worse.
BAR = 0.97
# Policies differ on a shape where their best and worst are further apart.
DIFFER_SHARE = 0.10
ALL = "all"
ROTATION = "rotation"
SATURATED = "saturated"


class Row(msgspec.Struct, frozen=True):
    """Verdicts of some shapes together."""

    shapes: int
    reuse_mean: float
    reuse_worst: float
    reuse_among_soon_worst: float
    ttft_mean: float
    ttft_worst: float
    ttft_below: float
    throughput_worst: float
    of_pooled: float
    of_endless: float
    # The share of shapes where a peer is ahead in both.
    ahead: float


class Worse(msgspec.Struct, frozen=True):
    """A shape on which a peer is better by more than the bar allows."""

    name: str
    verdict: Verdict


class Report(msgspec.Struct, frozen=True):
    """All that a report says. policies: mean reuse, of pooled, and the geometric mean of first tokens, of each."""

    own: str
    rows: dict[str, Row]
    policies: dict[str, tuple[float, float, float]]
    # The share of shapes on which the policies differ by over DIFFER_SHARE.
    differ: float
    worse: list[Worse]
    # Each shape's verdict, and its pace and the ratios of each policy to the best peer of the shape, for plots.
    verdicts: dict[str, Verdict]
    paces: dict[str, str]
    reuse_ratios: dict[str, list[float]]
    ttft_ratios: dict[str, list[float]]


def report_values(
    shapes: Mapping[tuple[int, int, bool], Mapping[str, Outcome]], own: str, peers: Sequence[str]
) -> Report:
    """Compare `own` with the peers on every shape that all of them have run on."""
    needed = {own, POOLED, ENDLESS, *peers}
    by_class: dict[str, list[Verdict]] = {}
    verdicts: dict[str, Verdict] = {}
    paces: dict[str, str] = {}
    worse: list[Worse] = []
    whole: list[Mapping[str, Outcome]] = []
    differ = 0
    for (seed, number, is_rotation), runs in sorted(shapes.items()):
        if not needed <= runs.keys():
            continue
        shape = draw_rotation(seed, number) if is_rotation else draw(seed, number)
        found = verdict(runs[own], [runs[peer] for peer in peers], runs[POOLED], runs[ENDLESS])
        for name in classes(shape) if is_rotation else (ALL, *classes(shape)):
            by_class.setdefault(name, []).append(found)
        if is_rotation:
            continue
        verdicts[shape.name], paces[shape.name] = found, shape.pace
        whole.append(runs)
        differ += _differ([runs[peer] for peer in peers])
        if _is_worse(found, shape):
            worse.append(Worse(shape.name, found))
    policies = {
        policy: (
            mean(runs[policy].reuse for runs in whole),
            mean(reuse_ratio(runs[policy], runs[POOLED]) for runs in whole),
            geometric_mean(runs[policy].ttft_mean_s + 1e-9 for runs in whole),
        )
        for policy in (own, *peers)
    }
    rows = {name: _row(found, is_saturated=name in (ALL, SATURATED)) for name, found in by_class.items()}
    if SATURATED in rows and ALL in rows:
        # Only a saturated fleet has a throughput of its own: any other serves what comes.
        rows[ALL] = msgspec.structs.replace(rows[ALL], throughput_worst=rows[SATURATED].throughput_worst)
    reuse_ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    ttft_ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    for runs, found in zip(whole, verdicts.values(), strict=True):
        most, _, soonest, _ = (runs[champion] for champion in found.champions)
        for policy in policies:
            reuse_ratios[policy].append(reuse_ratio(runs[policy], most))
            ttft_ratios[policy].append(ttft_ratio(runs[policy], soonest))
    differs = differ / max(1, len(whole))
    return Report(own, rows, policies, differs, worse, verdicts, paces, reuse_ratios, ttft_ratios)


def _row(found: Sequence[Verdict], *, is_saturated: bool) -> Row:
    return Row(
        len(found),
        mean(one.reuse for one in found),
        min(one.reuse for one in found),
        min(one.reuse_among_soon for one in found),
        mean(one.ttft for one in found),
        min(one.ttft for one in found),
        mean(float(one.ttft < BAR) for one in found),
        min(one.throughput for one in found) if is_saturated else 1.0,
        mean(one.of_pooled for one in found),
        mean(one.of_endless for one in found),
        mean(float(bool(one.ahead)) for one in found),
    )


def _differ(peers: Sequence[Outcome]) -> bool:
    reuse = [one.reuse for one in peers]
    ttft = [one.ttft_mean_s for one in peers]
    return max(reuse) - min(reuse) > DIFFER_SHARE or max(ttft) > (1 + DIFFER_SHARE) * min(ttft)


def _is_worse(found: Verdict, shape: Shape) -> bool:
    is_slow = shape.pace == SATURATED and found.throughput < BAR
    return bool(found.ahead) or found.reuse_among_soon < BAR or found.ttft < BAR or is_slow


def report_text(found: Report) -> str:
    """Write the report as Markdown."""
    lines = [
        "| class | shapes | reuse: mean, worst | among soon, worst | TTFT: mean, worst, below 0.97 | throughput, worst "
        "| of pooled | of endless | a peer ahead in both |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(found.rows, key=lambda name: (name != ALL, name == ROTATION, name))
    for name in order:
        row = found.rows[name]
        throughput = f"{row.throughput_worst:.3f}" if name in (ALL, SATURATED) else ""
        lines.append(
            f"| {name} | {row.shapes} | {row.reuse_mean:.3f}, {row.reuse_worst:.3f} | {row.reuse_among_soon_worst:.3f} "
            f"| {row.ttft_mean:.3f}, {row.ttft_worst:.3f}, {row.ttft_below:.1%} | {throughput} | {row.of_pooled:.3f} "
            f"| {row.of_endless:.3f} | {row.ahead:.1%} |"
        )
    lines += ["", "| policy | reuse, mean | of pooled | TTFT, geometric mean, s |", "|---|---|---|---|"]
    for policy, (reuse, pooled, ttft_s) in found.policies.items():
        lines.append(f"| {policy} | {reuse:.3f} | {pooled:.3f} | {ttft_s:.4f} |")
    lines += ["", f"The peers differ by over {DIFFER_SHARE:.0%} on {found.differ:.0%} of the shapes.", ""]
    for one in found.worse:
        v = one.verdict
        lines.append(
            f"- {one.name}: reuse {v.reuse:.3f} ({v.champions[0]}), among soon {v.reuse_among_soon:.3f} "
            f"({v.champions[1]}), TTFT {v.ttft:.3f} ({v.champions[2]}), throughput {v.throughput:.3f} ({v.champions[3]})"
            + (f"; ahead in both: {', '.join(v.ahead)}" if v.ahead else "")
        )
    return "\n".join(lines)
