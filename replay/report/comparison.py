# SPDX-License-Identifier: Apache-2.0
"""Runs of one trace side by side, and the sentence that says what this router would save. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrouter.replay.fleet.fleet_shape import PeerSpeed, Restart
from kvrouter.replay.policies.names import BASELINE, OWN
from kvrouter.replay.runs.policy_run import Summary

# A smaller relative difference is not worth a claim: seeds differ by as much (docs/reference/benchmarks.md).
EQUAL_SHARE = 0.01
POOLED = "one pooled cache"


class FleetRow(msgspec.Struct, frozen=True):
    """The options that all runs share, as they were given. A tuple about workers has one value for each."""

    trace: str
    format: str
    requests: int
    prompt_tokens: int
    trace_s: float
    shape: str
    block_tokens: int
    workers: int
    cache_tokens: tuple[int, ...]
    cpu_tokens: tuple[int, ...]
    prefill_tokens_per_s: tuple[float, ...]
    restarts: tuple[Restart, ...]
    speedup: float
    seed: int
    peer: PeerSpeed | None = None


class PooledRow(msgspec.Struct, frozen=True):
    """The reuse of one replica with the memory of the whole fleet, which serves one request after another."""

    prompt_tokens: int
    reused_tokens: int
    reused_share: float


class Comparison(msgspec.Struct, frozen=True):
    """A fleet, one row for each policy, the bound, and notes on estimated or omitted parts of the trace."""

    fleet: FleetRow
    rows: tuple[Summary, ...]
    # None if the run was interrupted before.
    pooled: PooledRow | None
    notes: tuple[str, ...]
    sentence: str


def compared(
    fleet: FleetRow, rows: Sequence[Summary], pooled_tokens: Sequence[int] | None, notes: Sequence[str]
) -> Comparison:
    """Put runs side by side.

    `pooled_tokens` are the tokens of each request that a pooled cache reuses; None if they are not known.
    """
    pooled = None
    if pooled_tokens is not None:
        reused = sum(pooled_tokens)
        pooled = PooledRow(fleet.prompt_tokens, reused, reused / max(1, fleet.prompt_tokens))
    return Comparison(fleet, tuple(rows), pooled, tuple(notes), sentence(rows))


def sentence(rows: Sequence[Summary]) -> str:
    """Say what `kv` saves against round robin, or else another policy, and which policies are better than `kv`."""
    whole = {row.policy: row for row in rows if not row.partial and row.requests}
    own = whole.get(OWN)
    if own is None:
        if not whole:
            return "No policy saw the whole trace, so this says nothing of what the fleet would save."
        best = max(whole.values(), key=lambda row: row.reused_tokens)
        return (
            f"Under {best.policy} this fleet would not compute {millions(best.reused_tokens)} of "
            f"{millions(best.prompt_tokens)} prompt tokens again ({best.reused_share:.1%}); {OWN} was not among the "
            "policies, or did not see the whole trace."
        )
    other = whole.get(BASELINE) or next((row for row in whole.values() if row is not own), None)
    if other is None:
        saved_s = own.reused_share * own.computed_gpu_s / max(1e-9, 1 - own.reused_share)
        return (
            f"Under {OWN} this fleet would not compute {millions(own.reused_tokens)} of "
            f"{millions(own.prompt_tokens)} prompt tokens again ({own.reused_share:.1%}): "
            f"{saved_s:,.0f} GPU-seconds of prefill."
        )
    return f"{_saving(own, other)}{_better(own, whole)}."


def _saving(own: Summary, other: Summary) -> str:
    computed, before = own.prompt_tokens - own.reused_tokens, other.prompt_tokens - other.reused_tokens
    saved, share = before - computed, (before - computed) / max(1, before)
    word = "save" if saved >= 0 else "cost"
    faster = other.ttft_mean_s - own.ttft_mean_s
    when = "sooner" if faster >= 0 else "later"
    return (
        f"Against {other.policy}, {OWN} would {word} this fleet {millions(abs(saved))} of {millions(before)} computed prompt "
        f"tokens ({abs(share):.1%}, {abs(other.computed_gpu_s - own.computed_gpu_s):,.0f} GPU-seconds), and first "
        f"tokens would come {_time(abs(faster))} {when} on average ({_time(own.ttft_mean_s)}, not {_time(other.ttft_mean_s)}; "
        f"p95 {_time(own.ttft_p95_s)}, not {_time(other.ttft_p95_s)})"
    )


def _better(own: Summary, whole: dict[str, Summary]) -> str:
    reuse = max(whole.values(), key=lambda row: row.reused_tokens)
    soonest = min(whole.values(), key=lambda row: row.ttft_mean_s)
    better = []
    if reuse.reused_tokens > own.reused_tokens * (1 + EQUAL_SHARE):
        better.append(f"{reuse.policy} reuses more ({millions(reuse.reused_tokens)})")
    if soonest.ttft_mean_s < own.ttft_mean_s * (1 - EQUAL_SHARE):
        better.append(f"{soonest.policy} has sooner first tokens ({_time(soonest.ttft_mean_s)})")
    return f"; {' and '.join(better)}" if better else ""


def _time(seconds: float) -> str:
    """Return a time as text, in milliseconds below a second: the traces of a first try have times that differ by some."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def millions(tokens: int) -> str:
    """Return a number of tokens as text, in millions from one million on."""
    return f"{tokens / 1e6:.2f} M" if tokens >= 1_000_000 else f"{tokens:,}"
