# SPDX-License-Identifier: Apache-2.0
"""The oracle: it finds the blocks in a sample that the engine did not hold at the shown seq. It does no I/O.

A life of the engine counts for as long as the router may not have learned of its end; after that, only the current life
counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.harness.core_router import Sample
from tests.chaos.harness.history import NOTHING, Held, History, Life, Place

# Time from a broken connection, or the first message of a new life, to the router's change of state. It takes
# milliseconds, but more under load.
NEWS_S = 2.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a sample with the life of the engine that fits it best."""

    # Blocks that are credited and were not held.
    ghosts: list[tuple[Place, int]]
    # Number of blocks that were held and are not credited.
    lost: int
    # None: no life fits, and the sample was compared with the engine's current blocks.
    life: Life | None
    is_current: bool


def judge(sample: Sample, history: History, now_s: float, blocked_until_s: float) -> Verdict:
    """Compare a sample with each life that the router may still believe in, and return the best verdict.

    Args:
        sample: The worker's state in the router.
        history: The lives of the worker's engine.
        now_s: The time of the sample.
        blocked_until_s: The time until which messages of the engine could not reach the router.
    """
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
    """Return whether the router may still believe that this life has not ended."""
    return life.ended_s is None or now_s < max(life.ended_s, blocked_until_s) + NEWS_S


def _compare(sample: Sample, held: Held, life: Life | None) -> Verdict:
    ghosts = [
        (place, block)
        for place, blocks in sample.credited.items()
        for block in sorted(blocks - held.get(place, frozenset()))
        # Sets that are read from the store while the worker's owner commits may be ahead of the seq for a moment
        # (`IndexStore.load`).
        if life is None or not life.held_later(sample.seq, place, block)
    ]
    lost = sum(len(blocks - sample.credited.get(place, frozenset())) for place, blocks in held.items())
    return Verdict(ghosts, lost, life, life is not None and life.ended_s is None)
