# SPDX-License-Identifier: Apache-2.0
"""Mirrored requests and the log's lines about them, joined by the request's id, whichever comes first. Pure.

At most MAX_WAITING requests and MAX_WAITING lines wait, with at most MAX_HELD workers in all snapshots. The oldest
beyond that goes, and is judged with the information that has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvrouter.shadow.observation import Outcome
from kvrouter.shadow.verdict import Snapshot

MAX_WAITING = 16_384
# A worker of a snapshot takes some 100 bytes.
MAX_HELD = 1_000_000


class Pair(NamedTuple):
    """A snapshot, and the outcome of its request as far as it is known."""

    snapshot: Snapshot
    outcome: Outcome


class _Waiting(NamedTuple):
    pair: Pair
    since_s: float


class Awaited:
    """The snapshots and outcomes that still wait for their counterpart, each for at most `wait_s` seconds."""

    def __init__(self, wait_s: float, max_waiting: int = MAX_WAITING, max_held: int = MAX_HELD) -> None:
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._max_held = max_held
        self._held = 0
        # Both are in the order of arrival.
        self._snapshots: dict[str, _Waiting] = {}
        self._outcomes: dict[str, tuple[Outcome, float]] = {}
        # Outcomes that were dropped because no request with their id came.
        self.unmatched = 0

    @property
    def waiting(self) -> int:
        """Snapshots that wait for their outcome."""
        return len(self._snapshots)

    def add_snapshot(self, request_id: str, pair: Pair, now_s: float) -> list[Pair]:
        """Return the pairs to judge now: this one if its outcome came first, and those that it pushes out."""
        ready = []
        if (older := self._take(request_id)) is not None:
            ready.append(older)
        if (outcome_entry := self._outcomes.pop(request_id, None)) is not None:
            return [*ready, Pair(pair.snapshot, _joined(pair.outcome, outcome_entry[0]))]
        self._snapshots[request_id] = _Waiting(pair, now_s)
        self._held += len(pair.snapshot.held)
        while len(self._snapshots) > self._max_waiting or self._held > self._max_held:
            ready += self._take_oldest()
        return ready

    def add_outcome(self, request_id: str, outcome: Outcome, now_s: float) -> list[Pair]:
        """Return the pair of this outcome if its request came first; otherwise keep the outcome."""
        if (pair := self._take(request_id)) is not None:
            return [Pair(pair.snapshot, _joined(pair.outcome, outcome))]
        self._outcomes[request_id] = (outcome, now_s)
        while len(self._outcomes) > self._max_waiting:
            self._drop_outcome()
        return []

    def expired(self, now_s: float) -> Iterator[Pair]:
        """Yield the pairs that have waited for too long, and drop such outcomes."""
        while self._outcomes and now_s - next(iter(self._outcomes.values()))[1] > self._wait_s:
            self._drop_outcome()
        while self._snapshots and now_s - next(iter(self._snapshots.values())).since_s > self._wait_s:
            yield from self._take_oldest()

    def rest(self) -> Iterator[Pair]:
        """Yield all pairs that still wait, at the end of the run."""
        self.unmatched += len(self._outcomes)
        self._outcomes.clear()
        while self._snapshots:
            yield from self._take_oldest()

    def _take(self, request_id: str) -> Pair | None:
        waiting = self._snapshots.pop(request_id, None)
        if waiting is None:
            return None
        self._held -= len(waiting.pair.snapshot.held)
        return waiting.pair

    def _take_oldest(self) -> list[Pair]:
        oldest = self._take(next(iter(self._snapshots)))
        return [] if oldest is None else [oldest]

    def _drop_outcome(self) -> None:
        del self._outcomes[next(iter(self._outcomes))]
        self.unmatched += 1


def _joined(mirrored: Outcome, logged: Outcome) -> Outcome:
    """Return the log's outcome, with the worker of the mirrored request's header if the log names none."""
    return Outcome(logged.worker or mirrored.worker, logged.cached_tokens, logged.prompt_tokens)
