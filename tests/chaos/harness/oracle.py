# SPDX-License-Identifier: Apache-2.0
"""Judges a sample: which blocks are credited that the engine did not hold at the seq that the router says it shows.
Pure.

A life of the engine counts for as long as the news of its end may be under way; after that only the present one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.harness.core_router import Sample
from tests.chaos.harness.history import NOTHING, Held, History, Life, Place

# From a broken connection, or the first word of a new life, to what the router shows: milliseconds; longer under load.
NEWS_S = 2.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """ghosts: credited and not held; lost: held and not credited. life: the one it was judged by, None when none
    fits."""

    ghosts: list[tuple[Place, int]]
    lost: int
    life: Life | None
    is_current: bool


def judge(sample: Sample, history: History, now_s: float, blocked_until_s: float) -> Verdict:
    """blocked_until_s: until then, news of the engine may not have reached the router."""
    best: Verdict | None = None
    for life in reversed(history.lives):
        held = life.at(sample.seq)
        if held is None or not admissible(life, now_s, blocked_until_s):
            continue
        verdict = _compare(sample, held, life)
        if best is None or (len(verdict.ghosts), not verdict.is_current, verdict.lost) < (
            len(best.ghosts),
            not best.is_current,
            best.lost,
        ):
            best = verdict
    if best is not None:
        return best
    current = history.current
    return _compare(sample, current[-1].states[-1] if current and current[-1].states else NOTHING, None)


def admissible(life: Life, now_s: float, blocked_until_s: float) -> bool:
    """Whether the router may still believe in this life."""
    return life.ended_s is None or now_s < max(life.ended_s, blocked_until_s) + NEWS_S


def _compare(sample: Sample, held: Held, life: Life | None) -> Verdict:
    ghosts = [
        (place, block)
        for place, blocks in sample.credited.items()
        for block in sorted(blocks - held.get(place, frozenset()))
        # Read from the store while the worker's owner commits, sets may be ahead of the seq for a moment
        # (`IndexStore.load`).
        if life is None or not life.held_later(sample.seq, place, block)
    ]
    lost = sum(len(blocks - sample.credited.get(place, frozenset())) for place, blocks in held.items())
    return Verdict(ghosts, lost, life, life is not None and life.ended_s is None)
