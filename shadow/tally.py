# SPDX-License-Identifier: Apache-2.0
"""Sums over the verdicts, and the report that they make. Pure. All counts are tokens unless a name says otherwise.

There is one row for each reason and one for each of at most MAX_WORKERS workers.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.escaping import masked
from kvrouter.shadow.observation import SKIP_TEXTS, Skip
from kvrouter.shadow.verdict import Verdict

# Pods come and go under new names; all workers beyond this number share a row.
MAX_WORKERS = 4_096
OTHERS = "(others)"
MAX_DETAIL_CHARS = 200


class WorkerRow(msgspec.Struct):
    """The sums of one worker."""

    worker: str
    # Requests that this worker got.
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    # Tokens of these requests that another worker held beyond the reused ones.
    lost_tokens: int = 0
    # Tokens that this worker held of other workers' requests, beyond the ones reused there.
    unused_tokens: int = 0
    # Tokens that this worker held of all requests.
    held_tokens: int = 0


class SkipRow(msgspec.Struct):
    """Requests that are not judged for one reason."""

    reason: Skip
    text: str
    requests: int = 0
    # The detail of the last of them that has one.
    detail: str = ""


class Placed(msgspec.Struct):
    """Requests whose worker is known."""

    requests: int = 0
    # Requests whose reuse was reported by an engine.
    reported_requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    # Tokens that the best worker held.
    there_tokens: int = 0
    # Requests that reused less than the best worker held.
    lost_requests: int = 0


class Unplaced(msgspec.Struct):
    """Requests whose worker is not known."""

    requests: int = 0
    prompt_tokens: int = 0
    there_tokens: int = 0


class Ours(msgspec.Struct):
    """Sums of the requests for which this router's own choice is known; each is in `Placed` or `Unplaced` too."""

    requests: int = 0
    # Tokens that this router's choice would have reused.
    ours_tokens: int = 0
    # Tokens that the best worker held.
    there_tokens: int = 0
    # Requests among them whose worker is known, with the tokens of both choices.
    placed_requests: int = 0
    placed_ours_tokens: int = 0
    reused_tokens: int = 0


class Check(msgspec.Struct):
    """Requests that have both a prediction from before they were served and the engine's own count after."""

    requests: int = 0
    equal_requests: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0


class Report(msgspec.Struct):
    """The sums of a run, final or up to now."""

    type: str
    elapsed_s: float
    judged_requests: int
    skipped_requests: int
    waiting_requests: int
    placed: Placed
    unplaced: Unplaced
    ours: Ours
    check: Check
    # Requests that their worker held whole, by prediction alone.
    whole_requests: int
    workers: list[WorkerRow]
    skipped: list[SkipRow]
    sentence: str


class Tally:
    """The sums of a run. Each request is passed once, either to `count` or to `skip`."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._max_workers = max_workers
        self.placed = Placed()
        self.unplaced = Unplaced()
        self.ours = Ours()
        self.check = Check()
        self.whole_requests = 0
        self._workers: dict[str, WorkerRow] = {}
        self._skipped: dict[Skip, SkipRow] = {}

    @property
    def judged_requests(self) -> int:
        """Requests with a verdict."""
        return self.placed.requests + self.unplaced.requests

    @property
    def skipped_requests(self) -> int:
        """Requests without a verdict."""
        return sum(row.requests for row in self._skipped.values())

    def skip(self, reason: Skip, detail: str = "", requests: int = 1) -> None:
        """Count requests that are not judged."""
        row = self._skipped.setdefault(reason, SkipRow(reason, SKIP_TEXTS[reason]))
        row.requests += requests
        if detail:
            row.detail = masked(detail[:MAX_DETAIL_CHARS])

    def count(self, verdict: Verdict) -> None:
        """Count a request that is judged."""
        for name, tokens in verdict.held.items():
            self._row(name).held_tokens += tokens
        reused = verdict.reused
        if verdict.worker is None or reused is None:
            self.unplaced.requests += 1
            self.unplaced.prompt_tokens += verdict.num_tokens
            self.unplaced.there_tokens += verdict.there
        else:
            self._count_placed(verdict, verdict.worker, reused)
        if verdict.ours is not None:
            self.ours.requests += 1
            self.ours.ours_tokens += verdict.ours
            self.ours.there_tokens += verdict.there
            if reused is not None:
                self.ours.placed_requests += 1
                self.ours.placed_ours_tokens += verdict.ours
                self.ours.reused_tokens += reused

    def _count_placed(self, verdict: Verdict, worker: str, reused: int) -> None:
        lost = verdict.there - reused
        placed, row = self.placed, self._row(worker)
        placed.requests += 1
        placed.reported_requests += verdict.is_reported
        placed.prompt_tokens += verdict.num_tokens
        placed.reused_tokens += reused
        placed.there_tokens += verdict.there
        placed.lost_requests += lost > 0
        row.requests += 1
        row.prompt_tokens += verdict.num_tokens
        row.reused_tokens += reused
        row.lost_tokens += lost
        if lost and verdict.best is not None:
            self._row(verdict.best).unused_tokens += lost
        self.whole_requests += verdict.is_whole
        if verdict.is_reported and verdict.predicted is not None:
            self.check.requests += 1
            self.check.equal_requests += verdict.predicted == reused
            self.check.predicted_tokens += verdict.predicted
            self.check.reported_tokens += reused

    def _row(self, worker: str) -> WorkerRow:
        if worker not in self._workers and len(self._workers) >= self._max_workers:
            worker = OTHERS
        return self._workers.setdefault(worker, WorkerRow(worker))

    def report(self, elapsed_s: float, *, waiting: int = 0, is_final: bool = True) -> Report:
        """Return the report; `waiting` is the number of requests that are not judged yet."""
        return Report(
            "report" if is_final else "counters",
            round(elapsed_s, 3),
            self.judged_requests,
            self.skipped_requests,
            waiting,
            self.placed,
            self.unplaced,
            self.ours,
            self.check,
            self.whole_requests,
            sorted(self._workers.values(), key=lambda row: (-row.lost_tokens, row.worker)),
            sorted(self._skipped.values(), key=lambda row: (-row.requests, row.reason)),
            self.sentence(),
        )

    def sentence(self) -> str:
        """Return the result as one sentence."""
        placed, unplaced = self.placed, self.unplaced
        if placed.requests:
            there = placed.there_tokens
            share = f" ({100 * placed.reused_tokens / there:.0f} %)" if there else ""
            return f"Your router reused {placed.reused_tokens:,} of {there:,} tokens that were there{share}."
        if unplaced.requests:
            return (
                f"{unplaced.there_tokens:,} of {unplaced.prompt_tokens:,} prompt tokens were there on the best worker; what "
                "your router reused is not known, because nothing named the workers (--worker-header, or --log beside "
                "--listen)."
            )
        return "No request was judged."
