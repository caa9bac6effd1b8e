# SPDX-License-Identifier: Apache-2.0
"""Compares what is registered with itself and with what the engines say of themselves, and notifies the streams."""

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

# Many workers that come at once are judged together: a pause lasts at least this, and so long that judging takes at
# most this share of the time. Judging a thousand workers takes tens of milliseconds.
JUDGE_PAUSE_S = 0.05
JUDGE_SHARE = 0.03


def kind_problem(stated: str | None, shown: Engine) -> str:
    """What is wrong with the kind that a worker was registered as; empty where nothing is."""
    if stated in (None, shown.name):
        return ""
    return f"its HTTP is {shown.title}'s, and it is registered as {stated}: register it with engine={shown.name}"


class RegistrationJudge:
    """Judges from the first `judge` on, and again whenever a worker comes, goes, or is registered otherwise."""

    def __init__(self, registry: WorkerRegistry, engines: EngineLists, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._engines = engines
        self._clock = clock
        # When it may be done next, when it will be, and by which publishers it was done last.
        self._next_s: float | None = None
        self._judging: asyncio.TimerHandle | None = None
        self._lives: dict[WorkerKey, str] = {}
        registry.subscribe(members=self._judge_soon)

    def stop(self) -> None:
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None

    def _judge_soon(self, worker: WorkerKey | None) -> None:
        """At once, unless it was done a moment ago."""
        if self._next_s is None:
            # A start loads them all, and judges once.
            return
        pause_s = self._next_s - self._clock()
        if pause_s <= 0:
            self.judge()
        elif self._judging is None:
            self._judging = asyncio.get_running_loop().call_later(pause_s, self.judge)

    def judge(self) -> None:
        self.stop()
        begun_s = self._clock()
        registrations, self._lives = self._registry.registrations(), self._publishers()
        contradictions = origin_problems(registrations, self._engines.sources, self._lives)
        ranks = Counter(one.worker.worker_id for one in registrations)
        for one in registrations:
            worker, url = one.worker, one.url or ""
            engine, kind = self._engines.served.get(url, ServedModels()), self._engines.kinds.get(url)
            self._registry.streams[worker].judge(
                alone=ranks[worker.worker_id] == 1,
                contradiction=contradictions.get(worker, ""),
                refused=refusal_problem(url, self._engines.refusing.get(url)),
                note=(kind and kind_problem(one.engine, kind))
                or unserved_problem(worker.model, engine.names, engine.adapters),
            )
        ended_s = self._clock()
        self._next_s = ended_s + max(JUDGE_PAUSE_S, (ended_s - begun_s) / JUDGE_SHARE)

    def judge_publishers(self) -> None:
        """To be called now and then, as patched publishers name their epochs at any time."""
        if self._publishers() != self._lives:
            self.judge()

    def _publishers(self) -> dict[WorkerKey, str]:
        """By worker, the epoch of the patched publisher that is followed for it."""
        lives = ((worker, stream.profile.patch.epoch) for worker, stream in self._registry.streams.items())
        return {worker: epoch for worker, epoch in lives if epoch}
