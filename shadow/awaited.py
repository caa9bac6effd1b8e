# SPDX-License-Identifier: Apache-2.0
"""Mirrored requests and the log's lines about them, joined by the request's id, whichever comes first. Pure.

Bounds: MAX_WAITING of each, and MAX_HELD workers in all snapshots; the oldest goes. It is then judged with what is known
of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvrouter.shadow.observation import Outcome
from kvrouter.shadow.verdict import Snapshot

MAX_WAITING = 16_384
# Some 100 bytes for each worker of a snapshot.
MAX_HELD = 1_000_000


class Pair(NamedTuple):
    """A snapshot, and the outcome of its request as far as it is known."""

    snapshot: Snapshot
    outcome: Outcome


class _Waiting(NamedTuple):
    pair: Pair
    since_s: float


class Awaited:
    """wait_s: how long an outcome is waited for. unmatched: outcomes without a request that were given up."""

    def __init__(self, wait_s: float, max_waiting: int = MAX_WAITING, max_held: int = MAX_HELD) -> None:
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._max_held = max_held
        self._held = 0
        # Both in the order of their arrival.
        self._snapshots: dict[str, _Waiting] = {}
        self._outcomes: dict[str, tuple[Outcome, float]] = {}
        self.unmatched = 0

    @property
    def waiting(self) -> int:
        return len(self._snapshots)

    def add_snapshot(self, request_id: str, pair: Pair, now_s: float) -> list[Pair]:
        """What can be judged by now: this one if its outcome came first, and what it pushes out."""
        ready = []
        if (older := self._take(request_id)) is not None:
            ready.append(older)
        if (known := self._outcomes.pop(request_id, None)) is not None:
            return [*ready, Pair(pair.snapshot, _joined(pair.outcome, known[0]))]
        self._snapshots[request_id] = _Waiting(pair, now_s)
        self._held += len(pair.snapshot.held)
        while len(self._snapshots) > self._max_waiting or self._held > self._max_held:
            ready += self._take_oldest()
        return ready

    def add_outcome(self, request_id: str, outcome: Outcome, now_s: float) -> list[Pair]:
        """The request that it is of, if that came first."""
        if (known := self._take(request_id)) is not None:
            return [Pair(known.snapshot, _joined(known.outcome, outcome))]
        self._outcomes[request_id] = (outcome, now_s)
        while len(self._outcomes) > self._max_waiting:
            self._drop_outcome()
        return []

    def expired(self, now_s: float) -> Iterator[Pair]:
        """Those that have waited for too long."""
        while self._outcomes and now_s - next(iter(self._outcomes.values()))[1] > self._wait_s:
            self._drop_outcome()
        while self._snapshots and now_s - next(iter(self._snapshots.values())).since_s > self._wait_s:
            yield from self._take_oldest()

    def rest(self) -> Iterator[Pair]:
        """All that still waits, at the end."""
        self.unmatched += len(self._outcomes)
        self._outcomes.clear()
        while self._snapshots:
            yield from self._take_oldest()

    def _take(self, request_id: str) -> Pair | None:
        found = self._snapshots.pop(request_id, None)
        if found is None:
            return None
        self._held -= len(found.pair.snapshot.held)
        return found.pair

    def _take_oldest(self) -> list[Pair]:
        oldest = self._take(next(iter(self._snapshots)))
        return [] if oldest is None else [oldest]

    def _drop_outcome(self) -> None:
        del self._outcomes[next(iter(self._outcomes))]
        self.unmatched += 1


def _joined(mirrored: Outcome, logged: Outcome) -> Outcome:
    """What the log says, and the worker of the mirrored request's header where it names none."""
    return Outcome(logged.worker or mirrored.worker, logged.cached_tokens, logged.prompt_tokens)
