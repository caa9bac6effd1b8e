# SPDX-License-Identifier: Apache-2.0
"""A defect in a task that keeps the mirror costs some time and credit, is named, and leaves the mirror right."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq

from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.fleet import mirror_sync as following
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import _Reader
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from tests.support.fake_engine import FakeEngine, prompt, stored

TIMEOUT_S = 30.0
BLOCKS = 4
WORKERS = ("w0", "w1", "w2", "w3")


class Defect(Exception):
    pass


class Stage:
    """Two routers that share the workers: each leads two, and reads the logs of the others.

    The tests look at `core`.
    """

    def __init__(self, core: Core, leader: Core, engines: dict[str, FakeEngine], registry: MetricRegistry) -> None:
        self.core = core
        self._leader = leader
        self.engines = engines
        self._registry = registry
        self.stored = 0

    def failures(self, task: str) -> float:
        return self._registry.get_sample_value("kvrouter_task_failures_total", {"task": task}) or 0.0

    def publish(self) -> None:
        """Publish another prompt on each engine."""
        self.stored += 1
        for engine in self.engines.values():
            engine.publish(stored(prompt(self.stored, BLOCKS), 0, BLOCKS))

    async def until(self, reached: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not reached():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{what}: {[*self.core.statuses()]} {self.core.health()}") from None

    def right(self) -> bool:
        """Return whether all workers are live and credited, and both mirrors have all their blocks."""
        for core, worker in itertools.product((self.core, self._leader), WORKERS):
            if len(core.mirror_sync.mirror.held(WorkerKey("m", worker), Place(0, "GPU"))) != BLOCKS * self.stored:
                return False
        return all(status.state == "live" and status.credited for status in self.core.statuses())

    def read_here(self) -> list[str]:
        """Return the workers whose logs `core` reads."""
        return [key.worker_id for key, follower in self.core.registry.followers.items() if not follower.lease.held]


def staged(body: Callable[[Stage], Awaitable[None]], url: str) -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        store = await IndexStore.open(url)
        registry = MetricRegistry()

        def make(registry: MetricRegistry, seed: int) -> Core:
            clock, rng = time.monotonic, random.Random(seed)
            supervisor = TaskSupervisor(clock=clock, rng=rng, failures=registry.task_failures)
            return Core(
                store=store, config=Config(), metrics=CoreMetrics(registry), zmq_context=context, clock=clock, rng=rng,
                supervisor=supervisor,
            )  # fmt: skip

        core, leader = make(registry, 1), make(MetricRegistry(), 2)
        engines = {worker: FakeEngine(context) for worker in WORKERS}
        await leader.start()
        await core.start()
        try:
            for worker, engine in engines.items():
                await core.register(
                    Registration(
                        WorkerKey("m", worker), events=engine.endpoint, replay=engine.replay_endpoint, patch=NO_PATCH
                    )
                )
            stage = Stage(core, leader, engines, registry)
            await stage.until(lambda: len(stage.read_here()) == len(WORKERS) // 2, "not shared")
            await stage.until(lambda: all(status.state == "live" for status in core.statuses()), "not live")
            stage.publish()
            await stage.until(stage.right, "not followed")
            await body(stage)
        finally:
            for worker in WORKERS:
                await core.unregister(worker)
            await core.stop()
            await leader.stop()
            await store.close()
            for engine in engines.values():
                engine.close()
            context.destroy(linger=0)

    asyncio.run(main())


def test_a_defect_while_the_mirror_is_written_is_made_up_for(
    embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        apply, failures = following.MirrorSync._apply, 2
        seen: set[tuple[str, bool]] = set()
        bad, *_ = stage.read_here()

        def see(worker: WorkerKey, view: WorkerView | None) -> None:
            if view is not None:
                seen.add((worker.worker_id, view.credited))

        stage.core.registry.subscribe(view=see)

        def fails(self: following.MirrorSync, entry: Any) -> None:
            nonlocal failures
            if entry.worker.worker_id == bad and failures:
                failures -= 1
                raise Defect
            apply(self, entry)

        monkeypatch.setattr(following.MirrorSync, "_apply", fails)
        for _ in range(3):
            stage.publish()
            await stage.until(stage.right, "the mirror stays behind")
        assert not failures and (bad, False) in seen
        assert not [worker for worker, credited in seen if worker != bad and not credited]
        assert stage.failures("mirror") == 0

    staged(body, embedded_url)


def test_a_defect_of_the_mirrors_task_is_made_up_for(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        in_turns, failures = following.in_turns, 2

        def fails(items: Any) -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                assert any(isinstance(item, LogEntry) for item in items)
                raise Defect
            return in_turns(items)

        monkeypatch.setattr(following, "in_turns", fails)
        stage.publish()
        await stage.until(lambda: stage.failures("mirror"), "it did not fail")
        assert any("task mirror failed" in reason for reason in stage.core.health())
        stage.publish()
        await stage.until(stage.right, "the mirror stays behind")

    staged(body, embedded_url)


def test_a_defect_of_a_reader_of_logs_is_made_up_for(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        advance, failures = _Reader._advance, 2

        def fails(self: _Reader, position: Any, entries: Any) -> Any:
            nonlocal failures
            advanced = advance(self, position, entries)
            if failures:
                failures -= 1
                raise Defect
            return advanced

        monkeypatch.setattr(_Reader, "_advance", fails)
        stage.publish()
        await stage.until(lambda: stage.failures("log_reader"), "it did not fail")
        assert any("task log_reader failed" in reason for reason in stage.core.health())
        stage.publish()
        await stage.until(stage.right, "the mirror stays behind")

    staged(body, embedded_url)
