# SPDX-License-Identifier: Apache-2.0
"""Compares registrations with each other and with the reports of the engines, and notifies the followers of problems."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.model.engines.engine import Engine
from kvrouter.router.model.engines.engine_lists import EngineLists, ServedModels
from kvrouter.router.model.workers.engine_answers import refusal_problem
from kvrouter.router.model.workers.model_names import unserved_problem
from kvrouter.router.model.workers.provenance import origin_problems

# Many workers that register at once are judged together. A pause between two judgements lasts at least JUDGE_PAUSE_S,
# and long enough that judging takes at most JUDGE_SHARE of the time. Judging a thousand workers takes tens of
# milliseconds.
JUDGE_PAUSE_S = 0.05
JUDGE_SHARE = 0.03


def kind_problem(stated: str | None, shown: Engine) -> str:
    """Return why a worker's registered kind of engine is wrong, or "" if it is right or none was registered."""
    if stated in (None, shown.name):
        return ""
    return f"its HTTP is {shown.title}'s, and it is registered as {stated}: register it with engine={shown.name}"


class RegistrationJudge:
    """The judge of all registrations. It works from the first `judge` on, and again when a worker changes."""

    def __init__(self, registry: WorkerRegistry, engines: EngineLists, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._engines = engines
        self._clock = clock
        # The earliest time of the next judgement, its timer if one is set, and the publishers that the last judgement
        # used.
        self._next_s: float | None = None
        self._judging: asyncio.TimerHandle | None = None
        self._lives: dict[WorkerKey, str] = {}
        registry.subscribe(members=self._judge_soon)

    def stop(self) -> None:
        """Cancel a judgement that is due later."""
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None

    def _judge_soon(self, worker: WorkerKey | None) -> None:
        """Judge at once, or after a pause if the last judgement was a moment ago."""
        if self._next_s is None:
            # At the start all registrations are loaded first, and `Core.start` then judges them once.
            return
        pause_s = self._next_s - self._clock()
        if pause_s <= 0:
            self.judge()
        elif self._judging is None:
            self._judging = asyncio.get_running_loop().call_later(pause_s, self.judge)

    def judge(self) -> None:
        """Judge all registrations now, and pass each worker's problems to its follower."""
        self.stop()
        begun_s = self._clock()
        registrations, self._lives = self._registry.registrations(), self._publishers()
        contradictions = origin_problems(registrations, self._engines.sources, self._lives)
        ranks = Counter(registration.worker.worker_id for registration in registrations)
        for registration in registrations:
            worker, url = registration.worker, registration.url or ""
            served, engine = self._engines.served.get(url, ServedModels()), self._engines.kinds.get(url)
            self._registry.followers[worker].judge(
                alone=ranks[worker.worker_id] == 1,
                contradiction=contradictions.get(worker, ""),
                refused=refusal_problem(url, self._engines.refusing.get(url)),
                note=(engine and kind_problem(registration.engine, engine))
                or unserved_problem(worker.model, served.names, served.adapters),
            )
        ended_s = self._clock()
        self._next_s = ended_s + max(JUDGE_PAUSE_S, (ended_s - begun_s) / JUDGE_SHARE)

    def judge_publishers(self) -> None:
        """Judge again if a patched publisher has changed. Call it regularly: they name their epochs at any time."""
        if self._publishers() != self._lives:
            self.judge()

    def _publishers(self) -> dict[WorkerKey, str]:
        """Return the epoch of the patched publisher that is followed for each worker."""
        lives = ((worker, follower.state.profile.patch.epoch) for worker, follower in self._registry.followers.items())
        return {worker: epoch for worker, epoch in lives if epoch}
