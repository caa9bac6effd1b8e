# SPDX-License-Identifier: Apache-2.0
"""A schedule with the router in this process.

Every credited block is judged many times a second, during and after faults.
"""

from __future__ import annotations

import asyncio
import random
import time

from kvrouter.router.model.workers.stream_state import CREDITED
from tests.chaos.harness.core_router import CoreRouter, Sample
from tests.chaos.harness.engines import Engine
from tests.chaos.harness.faults import FAULTS
from tests.chaos.harness.oracle import NEWS_S, Verdict, judge
from tests.chaos.harness.scene import Fault, Scene
from tests.chaos.harness.stage import AFTER_S, BEFORE_S, HOPELESS_S, LIVE, SAMPLE_S, SETTLE_S, START_S, Stage

MIXED = "mixed"

# A stall of the harness's own event loop that the trace mentions, as later failures may be due to it.
STALL_S = 0.3

# An index has caught up if it shows all messages that are at least this old; otherwise it counts as not right yet,
# whatever its state is.
CAUGHT_UP_S = 0.5

CREDITED_STATES = frozenset(state.value for state in CREDITED) | LIVE


# All faults but the one that takes half a minute.
OFTEN = [name for name in FAULTS if name != "store_silent"]


class Schedule(Stage):
    """A schedule with faults of engines, wires, store and clock."""

    def __init__(self, seed: int, fault: str, *, settle_s: float = SETTLE_S) -> None:
        super().__init__(seed, fault, settle_s=settle_s)
        self._shown: dict[str, tuple[object, ...]] = {}
        # Time since which the router has shown each engine correctly; None: it does not now.
        self._right_since: dict[str, float | None] = {}
        self._ended_s: float | None = None

    async def _play(self) -> None:
        router = CoreRouter(self._valkey.url, random.Random(self._rng.random()))
        await router.open()
        try:
            await self._play_with(router)
        finally:
            await router.close()

    async def _play_with(self, router: CoreRouter) -> None:
        plan = self._plan()
        await self._open_engines(plan)
        for engine in self._engines:
            await router.register(engine)
        watching = asyncio.get_running_loop().create_task(self._watch(router))
        try:
            await self._until(self._all_right, START_S)
            await asyncio.sleep(self._rng.uniform(BEFORE_S / 2, BEFORE_S))
            scene = Scene(self._rng, self._engines, self._valkey, router, self._say)
            for fault in plan:
                await self._hit(scene, fault)
            self._ended_s = time.monotonic()
            for name in self._right_since:
                self._right_since[name] = None
            self._say("the last fault has ended")
            await asyncio.sleep(AFTER_S)
            # A stream without replay is proven only by its next batch, so the load continues until all are right.
            await self._until(self._all_right, self._settle_s / 2)
            for engine in self._engines:
                engine.loaded = False
            await self._settle(scene, router)
        finally:
            watching.cancel()
            (ended,) = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    def _plan(self) -> list[Fault]:
        if self.outcome.fault == MIXED:
            return [FAULTS[self._rng.choice(OFTEN)] for _ in range(self._rng.randint(3, 5))]
        return [FAULTS[self.outcome.fault]] * (self._rng.randint(1, 3) if self.outcome.fault in OFTEN else 1)

    def _all_right(self) -> bool:
        return all(self._right_since.get(engine.name) for engine in self._engines)

    async def _watch(self, router: CoreRouter) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            if now - before > STALL_S:
                self._say(f"the harness itself stood still for {now - before:.2f} s")
            before = now
            self._note_blocked(now)
            for sample in router.sample():
                self._look(sample, now)
            await asyncio.sleep(SAMPLE_S)

    def _look(self, sample: Sample, now: float) -> None:
        engine = self._engine(sample.worker)
        self.outcome.samples += 1
        shown = (sample.state, sample.reason, sample.epoch)
        if self._shown.get(sample.worker) != shown:
            self._shown[sample.worker] = shown
            self._say(f"{sample.worker} {sample.state} at seq {sample.seq} of {sample.epoch}: {sample.reason}")
        verdict = judge(sample, engine.history, now, self._blocked_until.get(sample.worker, 0.0))
        if verdict.ghosts:
            self.outcome.ghosts_during[sample.state] += len(verdict.ghosts)
            if sample.state in LIVE:
                self._ghost(sample, verdict, engine)
        if sample.credited and sample.state not in CREDITED_STATES:
            self._fail(f"{sample.worker} is credited while {sample.state}", once=f"{sample.worker} {sample.state}")
        blocked_until_s = self._blocked_until.get(sample.worker, 0.0)
        behind_s = 0.0 if verdict.life is None else verdict.life.behind_s(sample.seq, now)
        if (
            sample.credited
            and sample.state in LIVE
            and verdict.is_current
            and min(behind_s, now - blocked_until_s) > NEWS_S
        ):
            self.outcome.behind += 1
        right = sample.state in LIVE and verdict.is_current and not verdict.ghosts and behind_s < CAUGHT_UP_S
        right = right and (verdict.lost == 0 or not self._lossless(engine, set()))
        if not right:
            self._right_since[sample.worker] = None
        elif self._right_since.get(sample.worker) is None:
            self._right_since[sample.worker] = now

    def _ghost(self, sample: Sample, verdict: Verdict, engine: Engine) -> None:
        place, block = verdict.ghosts[0]
        life = verdict.life or (engine.history.current or engine.history.lives)[-1]
        self._fail(
            f"{sample.worker} is {sample.state} at seq {sample.seq} with {len(verdict.ghosts)} ghosts, first {block:016x} in "
            f"{place}; {life.last_change(place, block)}; the engine is at "
            f"{[(current.stream, current.number, current.last_seq) for current in engine.history.current]}",
            once=f"{sample.worker} ghosts",
        )

    async def _settle(self, scene: Scene, router: CoreRouter) -> None:
        """Wait until each worker is live at its engine's last seq with exactly its blocks, and judge a last time."""
        beats = {sample.worker: sample.proofs for sample in router.sample()}
        unsettled: list[str] = []

        def settled() -> bool:
            unsettled.clear()
            for sample in router.sample():
                engine = self._engine(sample.worker)
                problem = self._problem(sample, engine, scene.excused)
                if problem is None and engine.reporter is not None and sample.proofs == beats[sample.worker]:
                    problem = "no heartbeat has proven it"
                if problem is not None:
                    engine.say_something()
                    unsettled.append(
                        f"{sample.worker} is {sample.state} at seq {sample.seq} ({sample.reason}): {problem}"
                    )
            return not unsettled

        patience_s = HOPELESS_S if self.outcome.failures else self._settle_s
        if not await self._until(settled, patience_s):
            for text in unsettled:
                self._fail(f"not settled after {patience_s:g} s: {text}")
        assert self._ended_s is not None
        for sample in router.sample():
            engine = self._engine(sample.worker)
            verdict = judge(sample, engine.history, time.monotonic(), 0.0)
            self.outcome.ghosts_after += len(verdict.ghosts)
            self.outcome.lost_after[engine.kind.value] += verdict.lost
            since = self._right_since.get(engine.name)
            if since is not None:
                self.outcome.recovered_s.append(max(0.0, since - self._ended_s))
            if not self.outcome.failures:
                self._ask(router, engine, verdict)

    def _ask(self, router: CoreRouter, engine: Engine, verdict: Verdict) -> None:
        """Check that no predicted hit is longer than the engine's own, and that it is equal if no block is lost."""
        assert engine.replica is not None
        for tokens in engine.prompts:
            predicted, reusable = router.gpu_hit(engine, tokens), engine.replica.find(tokens).tokens
            if predicted > reusable or (predicted < reusable and not verdict.lost):
                self._fail(f"{engine.name}: {predicted} tokens of a prompt promised, {reusable} would be reused")

    def _problem(self, sample: Sample, engine: Engine, excused: set[str]) -> str | None:
        """Return why the worker has not settled, or None if it has."""
        verdict = judge(sample, engine.history, time.monotonic(), 0.0)
        if sample.state not in LIVE:
            return "not live"
        if not verdict.is_current or verdict.life is None or sample.seq != verdict.life.last_seq:
            return f"the engine is at {[(life.stream, life.last_seq) for life in engine.history.current]}"
        if verdict.ghosts:
            return f"{len(verdict.ghosts)} ghosts"
        if verdict.lost and self._lossless(engine, excused):
            return f"{verdict.lost} blocks are held and not credited"
        return None
