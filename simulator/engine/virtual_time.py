# SPDX-License-Identifier: Apache-2.0
"""Replicas in virtual time: a discrete-event simulation in which a step takes as long as the timing model says.

Nothing waits and nothing is concurrent: the driver of a fleet submits requests at the times at which they arrive, and
collects the moments up to the next arrival. The same requests at the same times give the same run.

Most steps of a run only decode one token of each running request. Such quiet steps are taken together, with the times
that they have one by one. Until the last of them ends or a request arrives, the lengths of jobs are those before them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Literal

from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.cache.peer import PeerWish
from kvrouter.simulator.cache.text import Text
from kvrouter.simulator.engine.replica import Replica, Stuck
from kvrouter.simulator.engine.scheduler import Step
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.transfers import TransferTimes


@dataclass(frozen=True, slots=True)
class Moment:
    """A job's first token or its end."""

    time_s: float
    # Index in the fleet.
    replica: int
    job: Job
    kind: Literal["first_token", "done"]


class VirtualReplica:
    """A replica and the time at which its step under way ends.

    While the replica publishes events, `now_s` is the time of the step that ends. `next_s` can belong to another step,
    as the arrival of a request ends a step without tokens.
    """

    def __init__(self, replica: Replica, timing: Timing, *, slowdown: float = 1.0) -> None:
        """Create an idle replica; each step takes `slowdown` times as long as `timing` says."""
        self.replica = replica
        self.timing = timing
        self.slowdown = slowdown
        self.now_s = 0.0
        # When the step under way is computed, or the load ends that is waited for; None while there is neither.
        self.next_s: float | None = None
        self._step: Step | None = None
        # The ends of the quiet steps under way, the next one first.
        self._quiet_ends_s: list[float] = []
        self._transfers = TransferTimes(timing)

    def submit(self, text: Text, max_tokens: int, now_s: float, peer: PeerWish | None = None) -> Job:
        """Submit a request; an idle replica begins a step at once. Raises RequestRefused."""
        self.now_s = now_s
        job = self.replica.submit(text, max_tokens, peer=peer)
        if self._quiet_ends_s:
            # The request joins after the step that is under way now.
            self._quiet_ends_s = self._quiet_ends_s[: bisect_right(self._quiet_ends_s, now_s) + 1]
            self.next_s = self._quiet_ends_s[-1]
        elif self._step is None:
            self._begin(now_s)
        return job

    def advance(self) -> list[tuple[Job, Literal["first_token", "done"]]]:
        """End the step under way at `next_s` and begin the next one. Raises Stuck."""
        now_s, step = self.next_s, self._step
        assert now_s is not None
        self.now_s = now_s
        moments: list[tuple[Job, Literal["first_token", "done"]]] = []
        if self._quiet_ends_s:
            self.replica.scheduler.skip(len(self._quiet_ends_s))
            self._quiet_ends_s = []
        elif step is not None:
            self.replica.end_step(step, self._transfers.ended(now_s))
            moments += [(job, "first_token") for job in step.sampled if job.sampled == 1]
            moments += [(job, "done") for job in step.finished]
        self._begin(now_s)
        return moments

    def _begin(self, now_s: float) -> None:
        """Begin the next step that computes something. Steps without tokens, between transfers, take no time."""
        self._step = None
        quiet = self.replica.scheduler.quiet_steps()
        if quiet > 1:
            step_s = self.slowdown * self.timing.step_s(0, len(self.replica.scheduler.running))
            self._quiet_ends_s = list(accumulate(repeat(step_s, quiet), initial=now_s))[1:]
            self.next_s = self._quiet_ends_s[-1]
            return
        while self.replica.busy:
            step = self.replica.begin_step()
            self._transfers.begin(step, now_s)
            if step.jobs:
                self._step = step
                self.next_s = now_s + self.slowdown * self.timing.step_s(step.prefill_tokens, step.decodes)
                return
            ended = self._transfers.ended(now_s)
            self.replica.end_step(step, ended)
            if not ended and not self._transfers.has_stores:
                break
        self.next_s = self._transfers.next_load_s
        if self.next_s is None and not self.replica.scheduler.idle:
            raise Stuck(self.replica.scheduler.num_waiting)


class ReplicaFleet:
    """Several virtual replicas under one clock."""

    def __init__(self, replicas: Sequence[VirtualReplica]) -> None:
        self.replicas = list(replicas)

    def submit(self, replica: int, text: Text, max_tokens: int, now_s: float, peer: PeerWish | None = None) -> Job:
        """Submit a request to one replica. The moments before `now_s` must have been fetched."""
        return self.replicas[replica].submit(text, max_tokens, now_s, peer)

    def wish(self, source: int, timeout_s: float) -> PeerWish | None:
        """Return the wish of a request to fetch from this replica; None if it has no CPU tier."""
        offload = self.replicas[source].replica.offload
        return None if offload is None else PeerWish(offload.lender, timeout_s)

    def advance(self, until_s: float = float("inf")) -> Iterator[Moment]:
        """Yield the moments up to `until_s`, in order.

        After a moment, more requests may be submitted at that moment's time.
        """
        while True:
            next_s, number = min(
                ((replica.next_s, n) for n, replica in enumerate(self.replicas) if replica.next_s is not None),
                default=(float("inf"), -1),
            )
            if number < 0 or next_s > until_s:
                return
            for job, kind in self.replicas[number].advance():
                yield Moment(next_s, number, job, kind)
