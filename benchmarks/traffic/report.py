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
# Policies differ on a shape where their best and worst differ by more than this.
DIFFER_SHARE = 0.10
ALL = "all"
ROTATION = "rotation"
SATURATED = "saturated"


class Row(msgspec.Struct, frozen=True):
    """The verdicts of some shapes together."""

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
    # The share of shapes where a peer is ahead in both reuse and first tokens.
    ahead: float


class Worse(msgspec.Struct, frozen=True):
    """A shape on which a peer is better by more than the bar allows."""

    name: str
    verdict: Verdict


class Report(msgspec.Struct, frozen=True):
    """All values of a report."""

    own: str
    rows: dict[str, Row]
    # The mean reuse, the mean reuse by the pooled cache's, and the geometric mean of first tokens of each policy.
    policies: dict[str, tuple[float, float, float]]
    # The share of shapes on which the policies differ by over DIFFER_SHARE.
    differ: float
    worse: list[Worse]
    # For plots, of each shape: the verdict, the pace, and each policy's ratios to the best peer of the shape.
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
    compared: list[Mapping[str, Outcome]] = []
    differ = 0
    for (seed, number, is_rotation), runs in sorted(shapes.items()):
        if not needed <= runs.keys():
            continue
        shape = draw_rotation(seed, number) if is_rotation else draw(seed, number)
        shape_verdict = verdict(runs[own], [runs[peer] for peer in peers], runs[POOLED], runs[ENDLESS])
        for name in classes(shape) if is_rotation else (ALL, *classes(shape)):
            by_class.setdefault(name, []).append(shape_verdict)
        if is_rotation:
            continue
        verdicts[shape.name], paces[shape.name] = shape_verdict, shape.pace
        compared.append(runs)
        differ += _differ([runs[peer] for peer in peers])
        if _is_worse(shape_verdict, shape):
            worse.append(Worse(shape.name, shape_verdict))
    policies = {
        policy: (
            mean(runs[policy].reuse for runs in compared),
            mean(reuse_ratio(runs[policy], runs[POOLED]) for runs in compared),
            geometric_mean(runs[policy].ttft_mean_s + 1e-9 for runs in compared),
        )
        for policy in (own, *peers)
    }
    rows = {
        name: _row(shape_verdict, is_saturated=name in (ALL, SATURATED)) for name, shape_verdict in by_class.items()
    }
    if SATURATED in rows and ALL in rows:
        # Only a saturated fleet limits its own throughput: any other serves all requests that come.
        rows[ALL] = msgspec.structs.replace(rows[ALL], throughput_worst=rows[SATURATED].throughput_worst)
    reuse_ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    ttft_ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    for runs, shape_verdict in zip(compared, verdicts.values(), strict=True):
        most, _, soonest, _ = (runs[champion] for champion in shape_verdict.champions)
        for policy in policies:
            reuse_ratios[policy].append(reuse_ratio(runs[policy], most))
            ttft_ratios[policy].append(ttft_ratio(runs[policy], soonest))
    differs = differ / max(1, len(compared))
    return Report(own, rows, policies, differs, worse, verdicts, paces, reuse_ratios, ttft_ratios)


def _row(verdicts: Sequence[Verdict], *, is_saturated: bool) -> Row:
    return Row(
        len(verdicts),
        mean(each.reuse for each in verdicts),
        min(each.reuse for each in verdicts),
        min(each.reuse_among_soon for each in verdicts),
        mean(each.ttft for each in verdicts),
        min(each.ttft for each in verdicts),
        mean(float(each.ttft < BAR) for each in verdicts),
        min(each.throughput for each in verdicts) if is_saturated else 1.0,
        mean(each.of_pooled for each in verdicts),
        mean(each.of_endless for each in verdicts),
        mean(float(bool(each.ahead)) for each in verdicts),
    )


def _differ(peers: Sequence[Outcome]) -> bool:
    reuse = [peer.reuse for peer in peers]
    ttft = [peer.ttft_mean_s for peer in peers]
    return max(reuse) - min(reuse) > DIFFER_SHARE or max(ttft) > (1 + DIFFER_SHARE) * min(ttft)


def _is_worse(shape_verdict: Verdict, shape: Shape) -> bool:
    is_slow = shape.pace == SATURATED and shape_verdict.throughput < BAR
    return bool(shape_verdict.ahead) or shape_verdict.reuse_among_soon < BAR or shape_verdict.ttft < BAR or is_slow


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
    for worse in found.worse:
        v = worse.verdict
        lines.append(
            f"- {worse.name}: reuse {v.reuse:.3f} ({v.champions[0]}), among soon {v.reuse_among_soon:.3f} "
            f"({v.champions[1]}), TTFT {v.ttft:.3f} ({v.champions[2]}), throughput {v.throughput:.3f} ({v.champions[3]})"
            + (f"; ahead in both: {', '.join(v.ahead)}" if v.ahead else "")
        )
    return "\n".join(lines)
