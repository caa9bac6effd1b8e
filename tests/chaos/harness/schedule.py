# SPDX-License-Identifier: Apache-2.0
"""One schedule: engines under load, a router before them, a few faults at random moments, and the judgement during and after.

Everything is drawn from the seed; what is not is the timing of real sockets. So a seed repeats a schedule, not each interleaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kvrouter.router.states import CREDITED, StreamState
from kvrouter.simulator.shapes import Geometry, gemma3, gpt_oss, llama, qwen3_next

from .core_router import CoreRouter, Sample
from .engines import Engine, Kind, Shape
from .faults import FAULTS, Fault, Scene
from .oracle import Verdict, judge
from .valkey import Valkey

MIXED = "mixed"

SAMPLE_S = 0.02
# Load before the first fault, and after the last: ghosts of a missed batch may show with the next one only.
BEFORE_S, AFTER_S = 0.6, 0.8
# Until all is settled: a snapshot is asked for again after 30 s at worst, a silent patch is given up after 15 s.
START_S, SETTLE_S = 30.0, 75.0
# The same where ghosts were seen already: only to show whether they stay.
HOPELESS_S = 5.0
# Lines of a failure's trace, at its beginning and at its end.
TRACE_LINES = 40
# Our own loop stood still for so long: what follows may be its fault, and the trace says so.
STALL_S = 0.3

LIVE = frozenset({StreamState.LIVE.value, StreamState.UNHASHABLE.value})
CREDITED_STATES = frozenset(state.value for state in CREDITED) | LIVE


@dataclass(slots=True)
class Outcome:
    """What came of one schedule. Blocks are counted once for each sample that showed them. lost_after: by kind of engine."""

    seed: int
    fault: str
    faults: int = 0
    seconds: float = 0.0
    samples: int = 0
    ghosts_during: Counter[str] = field(default_factory=Counter)
    ghosts_after: int = 0
    lost_after: Counter[str] = field(default_factory=Counter)
    recovered_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class Schedule:
    """Runs once."""

    def __init__(self, seed: int, fault: str | None = None, *, settle_s: float = SETTLE_S) -> None:
        """fault: its kind, or MIXED; None: by the seed. settle_s: how long it may take until all is right again."""
        self._rng = random.Random(seed)
        names = [*FAULTS, MIXED]
        drawn = names[seed % len(names)]
        self.outcome = Outcome(seed, fault or drawn)
        self._engines: list[Engine] = []
        self._lines: list[tuple[float, str]] = []
        self._shown: dict[str, tuple[object, ...]] = {}
        self._blocked_until: dict[str, float] = {}
        # Since when each engine has been shown without a fault; None: it is not.
        self._right_since: dict[str, float | None] = {}
        self._ended_s: float | None = None
        self._settle_s = settle_s
        self._told: set[str] = set()
        self._begun_s = 0.0

    async def run(self) -> Outcome:
        self._begun_s = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        valkey = Valkey(folder)
        router = CoreRouter(valkey.url, self._rng)
        try:
            await valkey.open()
            router = CoreRouter(valkey.url, random.Random(self._rng.random()))
            await router.open()
            try:
                await self._play(context, valkey, router)
            finally:
                await router.close()
        finally:
            for engine in self._engines:
                with contextlib.suppress(zmq.ZMQError):
                    await engine.close()
            await valkey.close()
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
        self.outcome.seconds = time.monotonic() - self._begun_s
        if self.outcome.failures:
            lines = [f"{at_s:7.3f} s  {line}" for at_s, line in self._lines]
            left_out = len(lines) - 2 * TRACE_LINES
            if left_out > 0:
                lines[TRACE_LINES:-TRACE_LINES] = [f"... {left_out} lines ..."]
            self.outcome.trace = lines
        return self.outcome

    async def _play(self, context: zmq.Context[zmq.Socket[bytes]], valkey: Valkey, router: CoreRouter) -> None:
        rng = self._rng
        plan = self._plan()
        geometry = _geometry(rng)
        for number, kind in enumerate(_engine_kinds(rng, plan)):
            engine = Engine(
                f"{kind.value}{number}", kind, _shape(rng, geometry, plan, kind),
                context=context, rng=random.Random(rng.random()), clock=time.monotonic,
            )  # fmt: skip
            self._engines.append(engine)
            await engine.open()
        self._say(f"engines {', '.join(e.name for e in self._engines)}; groups as in {geometry.name}")
        for engine in self._engines:
            await router.register(engine)
        watching = asyncio.get_running_loop().create_task(self._watch(router))
        try:
            await self._until(lambda: all(self._right_since.get(e.name) for e in self._engines), START_S)
            await asyncio.sleep(rng.uniform(BEFORE_S / 2, BEFORE_S))
            scene = Scene(rng, self._engines, valkey, router, self._say)
            await self._inject(scene, plan)
            self._ended_s = time.monotonic()
            for name in self._right_since:
                self._right_since[name] = None
            self._say("the last fault has ended")
            await asyncio.sleep(AFTER_S)
            # A stream without replay proves itself with the next batch only, so the load goes on until all are right.
            await self._until(lambda: all(self._right_since.get(e.name) for e in self._engines), self._settle_s / 2)
            for engine in self._engines:
                engine.loaded = False
            await self._settle(scene, router)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if not watching.cancelled() and watching.exception() is not None:
            raise watching.exception()  # type: ignore[misc]

    def _plan(self) -> list[Fault]:
        if self.outcome.fault == MIXED:
            return [FAULTS[self._rng.choice(list(FAULTS))] for _ in range(self._rng.randint(3, 5))]
        return [FAULTS[self.outcome.fault]] * self._rng.randint(1, 3)

    async def _inject(self, scene: Scene, plan: list[Fault]) -> None:
        """One after another, some of them at once on different engines."""
        for fault in plan:
            self.outcome.faults += 1
            if not fault.kinds:
                self._say(f"fault {fault.name}")
                await fault.act(scene)
                continue
            able = [engine for engine in self._engines if engine.kind in fault.kinds]
            hit = [engine for engine in able if self._rng.random() < 0.7] or [self._rng.choice(able)]
            self._say(f"fault {fault.name} on {', '.join(engine.name for engine in hit)}")
            self.outcome.faults += len(hit) - 1
            await asyncio.gather(*(fault.act(scene, engine) for engine in hit))

    async def _watch(self, router: CoreRouter) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            if now - before > STALL_S:
                self._say(f"the harness itself stood still for {now - before:.2f} s")
            before = now
            for engine in self._engines:
                if engine.news_blocked:
                    self._blocked_until[engine.name] = now
            for sample in router.sample():
                self._look(sample, now)
            await asyncio.sleep(SAMPLE_S)

    def _look(self, sample: Sample, now: float) -> None:
        engine = next(engine for engine in self._engines if engine.name == sample.worker)
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
        right = sample.state in LIVE and verdict.is_current and not verdict.ghosts
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
            f"{[(one.stream, one.number, one.last_seq) for one in engine.history.current]}",
            once=f"{sample.worker} ghosts",
        )

    async def _settle(self, scene: Scene, router: CoreRouter) -> None:
        """Until every worker is live at its engine's last seq and shows just what is held; then the last judgement."""
        beats = {sample.worker: sample.proofs for sample in router.sample()}
        unsettled: list[str] = []

        def settled() -> bool:
            unsettled.clear()
            for sample in router.sample():
                engine = next(engine for engine in self._engines if engine.name == sample.worker)
                problem = self._problem(sample, engine, scene.excused)
                if problem is None and engine.reporter is not None and sample.proofs == beats[sample.worker]:
                    problem = "no heartbeat has proven it"
                if problem is not None:
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
            engine = next(engine for engine in self._engines if engine.name == sample.worker)
            verdict = judge(sample, engine.history, time.monotonic(), 0.0)
            self.outcome.ghosts_after += len(verdict.ghosts)
            self.outcome.lost_after[engine.kind.value] += verdict.lost
            since = self._right_since.get(engine.name)
            if since is not None:
                self.outcome.recovered_s.append(max(0.0, since - self._ended_s))
            if not self.outcome.failures:
                self._ask(router, engine, verdict)

    def _ask(self, router: CoreRouter, engine: Engine, verdict: Verdict) -> None:
        """The answers too: never a longer hit than the engine would give, and the same where nothing is lost."""
        assert engine.replica is not None
        for tokens in engine.prompts:
            said, true = router.gpu_hit(engine, tokens), engine.replica.find(tokens).tokens
            if said > true or (said < true and not verdict.lost):
                self._fail(f"{engine.name}: {said} tokens of a prompt promised, {true} would be reused")

    def _problem(self, sample: Sample, engine: Engine, excused: set[str]) -> str | None:
        """Why this is not the end yet."""
        verdict = judge(sample, engine.history, time.monotonic(), 0.0)
        if sample.state not in LIVE:
            return "not live"
        if not verdict.is_current or verdict.life is None or sample.seq != verdict.life.last_seq:
            return f"the engine is at {[(one.stream, one.last_seq) for one in engine.history.current]}"
        if verdict.ghosts:
            return f"{len(verdict.ghosts)} ghosts"
        if verdict.lost and self._lossless(engine, excused):
            return f"{verdict.lost} blocks are held and not credited"
        return None

    def _lossless(self, engine: Engine, excused: set[str]) -> bool:
        return engine.kind is not Kind.PLAIN and engine.name not in excused

    async def _until(self, reached: Callable[[], bool], patience_s: float) -> bool:
        give_up_s = time.monotonic() + patience_s
        while not reached():
            if time.monotonic() > give_up_s:
                return False
            await asyncio.sleep(SAMPLE_S)
        return True

    def _fail(self, text: str, once: str = "") -> None:
        """once: of the failures with the same name, only the first is told; what follows is the same again."""
        if not once or once not in self._told:
            self._told.add(once)
            self.outcome.failures.append(text)
            self._say(f"WRONG: {text}")

    def _say(self, text: str) -> None:
        self._lines.append((time.monotonic() - self._begun_s, text))


def _geometry(rng: random.Random) -> Geometry:
    return rng.choice(
        (
            llama(),
            gemma3(window=64, sliding_groups=2),
            gpt_oss(window=32),
            qwen3_next(block_size=16, mamba_groups=2),
        )
    )


def _engine_kinds(rng: random.Random, plan: list[Fault]) -> list[Kind]:
    """Two or three engines, among them one that each fault of the plan can hit."""
    kinds = [Kind.STOCK, Kind.PLAIN, Kind.PATCHED]
    rng.shuffle(kinds)
    if rng.random() < 0.3:
        shorter = kinds[:2]
        if all(not fault.kinds or fault.kinds & set(shorter) for fault in plan):
            return shorter
    return kinds


def _shape(rng: random.Random, geometry: Geometry, plan: list[Fault], kind: Kind) -> Shape:
    """Pools far too small for the prompts, so that evictions never end."""
    special: dict[str, int] = {}
    for fault in plan:
        if kind in fault.kinds:
            special |= fault.shape
    groups = len(geometry.groups)
    return Shape(
        geometry,
        gpu_blocks=groups * rng.randint(20, 60),
        cpu_blocks=rng.choice((0, 20, 60)),
        disk_blocks=rng.choice((0, 30)),
        **special,
    )
