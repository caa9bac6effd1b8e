# SPDX-License-Identifier: Apache-2.0
"""A comparison as text of 80 columns, for people. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby

from kvrouter.replay.policies.names import OWN
from kvrouter.replay.policies.this_router import PULLING
from kvrouter.replay.report.comparison import POOLED, Comparison, FleetRow, millions
from kvrouter.replay.runs.policy_run import Summary

COLUMNS = 80
HEADS = (
    ("policy", "reused", "of the", "of", "TTFT", "", "", "", "busiest"),
    ("", "tokens", "prompts", "best", "mean s", "p50", "p95", "p99", "/ mean"),
)
# A larger share of the best hits means that at most choices no worker had any: the trace's prompts come at once.
MAX_SHARE = 100
WIDTHS = (20, 9, 8, 6, 8, 7, 7, 7, 8)


def text(found: Comparison) -> str:
    """Return the fleet, the table, the notes and the sentence."""
    parts = [_fleet(found.fleet), "", *(_cells(head) for head in HEADS), "-" * COLUMNS]
    parts += [_row(row) for row in found.rows]
    if found.pooled is not None:
        pooled = (_tokens(found.pooled.reused_tokens), f"{found.pooled.reused_share:.1%}")
        parts.append(_cells((POOLED, *pooled, *["-"] * (len(WIDTHS) - 3))))
    parts += [_pulls(row) for row in found.rows if row.policy == PULLING]
    parts += [note for row in found.rows if (note := _incomplete(row, found.fleet))]
    parts.append("")
    parts += [_wrapped(f"note: {note}") for note in found.notes]
    parts += [_wrapped(found.sentence)]
    return "\n".join(parts)


def _fleet(fleet: FleetRow) -> str:
    tier = f", CPU tier {_each(fleet.cpu_tokens)} tokens" if any(fleet.cpu_tokens) else ""
    restarts = ", ".join(f"w{restart.worker} at {restart.time_s:,g} s" for restart in fleet.restarts)
    lends = ""
    if fleet.peer is not None:
        lends = f", lent at {fleet.peer.bytes_per_s / 1e9:g} GB/s and {fleet.peer.latency_s * 1e3:g} ms"
    faster = f", {fleet.speedup:g} times as fast" if fleet.speedup != 1 else ""
    return _wrapped(
        f"{fleet.trace} ({fleet.format}): {fleet.requests:,} requests in {fleet.trace_s:,.0f} s{faster}, "
        f"{millions(fleet.prompt_tokens)} prompt tokens; {fleet.workers} x {fleet.shape}, blocks of "
        f"{fleet.block_tokens} tokens, cache {_each(fleet.cache_tokens)} tokens{tier}{lends}, "
        f"{_each(fleet.prefill_tokens_per_s)} tokens/s each{f'; restarts: {restarts}' if restarts else ''}; "
        f"seed {fleet.seed}"
    )


def _each(values: Sequence[float]) -> str:
    """Return the value that all workers have, or the runs of equal values with their lengths, in the workers' order."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    if len(runs) == 1:
        return f"{values[0]:,.0f}"
    return " + ".join(f"{count} x {value:,.0f}" for value, count in runs)


def _row(row: Summary) -> str:
    return _cells(
        (
            f"{row.policy}{'*' if row.policy in (OWN, PULLING) else ''}{' (partial)' if row.partial else ''}",
            _tokens(row.reused_tokens),
            f"{row.reused_share:.1%}",
            f"{row.achieved_share:.0%}" if row.achieved_share < MAX_SHARE else "-",
            seconds(row.ttft_mean_s, 3),
            seconds(row.ttft_p50_s, 2),
            seconds(row.ttft_p95_s, 2),
            seconds(row.ttft_p99_s, 2),
            f"{row.balance:.2f}",
        )
    )


def _tokens(tokens: int) -> str:
    """Return a number of tokens as one word, so that rows have as many words as columns."""
    return millions(tokens).replace(" ", "")


def seconds(value: float, digits: int) -> str:
    """Return a number of at most 6 characters below 100,000 s: a queue without end needs no fractions."""
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def _incomplete(row: Summary, fleet: FleetRow) -> str:
    if row.partial:
        return _wrapped(f"{row.policy} was ended after {row.requests:,} of {fleet.requests:,} requests")
    if row.refused:
        return _wrapped(f"{row.policy}: {row.refused:,} requests did not fit their worker and are not counted")
    return ""


def _pulls(row: Summary) -> str:
    """Return what workers fetched from each other, and what did not arrive."""
    reasons = {
        "came too late": row.late_tokens,
        "were lost with their source": row.gone_tokens,
        "found no room": row.no_room_tokens,
        "were evicted before": row.evicted_tokens,
    }
    missing = sum(reasons.values())
    share = missing / max(1, missing + row.pulled_tokens)
    because = ", ".join(f"{millions(tokens)} {reason}" for reason, tokens in reasons.items() if tokens)
    return _wrapped(
        f"{row.policy}: {row.pulls:,} requests fetched {millions(row.pulled_tokens)} tokens, "
        f"{row.pulled_tokens / max(1, row.reused_tokens):.1%} of the reused ones; {millions(missing)} that were to be "
        f"fetched did not arrive ({share:.2%}){f': {because}' if because else ''}"
    )


def _cells(cells: tuple[str, ...]) -> str:
    first, *others = zip(cells, WIDTHS, strict=True)
    return (f"{first[0]:<{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in others)).rstrip()


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, COLUMNS, break_on_hyphens=False)
