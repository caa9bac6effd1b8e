# SPDX-License-Identifier: Apache-2.0
"""The parts of every schedule: a seed, a store, engines behind proxies, a trace, and an outcome.

All random choices come from the seed, but the timing of real sockets does not. So a seed repeats a schedule, but not
every interleaving.
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

from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.simulator.cache.shapes import Geometry, gemma3, gpt_oss, llama, qwen3_next
from tests.chaos.harness.engines import Engine
from tests.chaos.harness.scene import Fault, Scene
from tests.chaos.harness.shape import Kind, Shape
from tests.chaos.harness.valkey import Valkey

SAMPLE_S = 0.02
# Load before the first fault and after the last, as ghosts of a missed batch may only show with the next batch.
BEFORE_S, AFTER_S = 0.6, 0.8
# Time until all workers have settled, at the start and at the end. A snapshot is requested again after 30 s at worst,
# and a silent patch is given up after 15 s.
START_S, SETTLE_S = 30.0, 75.0
# Time to settle if there were ghosts already, only to show whether they stay.
HOPELESS_S = 5.0
# Lines of a failure's trace, at its beginning and at its end.
TRACE_LINES = 40

LIVE = frozenset({StreamState.LIVE.value, StreamState.UNHASHABLE.value})


@dataclass(slots=True)
class Outcome:
    """The outcome of one schedule; blocks are counted once for each sample that showed them."""

    seed: int
    fault: str
    # Number of faults, counted for each engine that they hit.
    faults: int = 0
    seconds: float = 0.0
    samples: int = 0
    # Samples of live workers whose index was not up to date, although the engine had long sent its next message.
    behind: int = 0
    # Ghosts before the last judgement, by the worker's state.
    ghosts_during: Counter[str] = field(default_factory=Counter)
    ghosts_after: int = 0
    # Lost blocks at the end, by the kind of engine.
    lost_after: Counter[str] = field(default_factory=Counter)
    # Seconds from the end of the last fault until a worker was right, one for each worker.
    recovered_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class Stage:
    """The base of a schedule: it sets up the store, calls `_play`, and tears everything down; it runs once."""

    def __init__(self, seed: int, fault: str, *, settle_s: float = SETTLE_S) -> None:
        """Prepare a schedule.

        Args:
            seed: The source of all random choices.
            fault: The name of the fault, or of a mix of them.
            settle_s: How long it may take until all workers are right again.
        """
        self._rng = random.Random(seed)
        self.outcome = Outcome(seed, fault)
        self._engines: list[Engine] = []
        self._valkey: Valkey
        self._folder: Path
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._settle_s = settle_s
        self._begun_s = 0.0
        self._lines: list[tuple[float, str]] = []
        self._told: set[str] = set()
        # Time until which messages of each engine could not reach the router.
        self._blocked_until: dict[str, float] = {}

    async def run(self) -> Outcome:
        self._begun_s = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
        self._context = zmq.Context()
        self._valkey = Valkey(self._folder)
        try:
            await self._valkey.open()
            await self._play()
        finally:
            for engine in self._engines:
                with contextlib.suppress(zmq.ZMQError):
                    await engine.close()
            await self._valkey.close()
            # It waits for its sockets, so it must not run in the loop's thread.
            await asyncio.to_thread(self._context.destroy, linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
        self.outcome.seconds = time.monotonic() - self._begun_s
        if self.outcome.failures:
            lines = [f"{at_s:7.3f} s  {line}" for at_s, line in self._lines]
            left_out = len(lines) - 2 * TRACE_LINES
            if left_out > 0:
                lines[TRACE_LINES:-TRACE_LINES] = [f"... {left_out} lines ..."]
            self.outcome.trace = lines
        return self.outcome

    async def _play(self) -> None:
        raise NotImplementedError

    async def _open_engines(self, plan: list[Fault]) -> None:
        rng = self._rng
        geometry = _geometry(rng)
        for number, kind in enumerate(_engine_kinds(rng, plan)):
            engine = Engine(
                f"{kind.value}{number}", kind, _shape(rng, geometry, plan, kind),
                context=self._context, rng=random.Random(rng.random()), clock=time.monotonic,
            )  # fmt: skip
            self._engines.append(engine)
            await engine.open()
        self._say(f"engines {', '.join(engine.name for engine in self._engines)}; groups as in {geometry.name}")

    async def _hit(self, scene: Scene, fault: Fault) -> None:
        """Cause one fault, on some of the engines that it can hit, or on the parts that all engines share."""
        self.outcome.faults += 1
        if not fault.kinds:
            self._say(f"fault {fault.name}")
            await fault.act(scene)
            return
        able = [engine for engine in self._engines if engine.kind in fault.kinds]
        hit = [engine for engine in able if self._rng.random() < 0.7] or [self._rng.choice(able)]
        self._say(f"fault {fault.name} on {', '.join(engine.name for engine in hit)}")
        self.outcome.faults += len(hit) - 1
        await asyncio.gather(*(fault.act(scene, engine) for engine in hit))

    def _note_blocked(self, now: float) -> None:
        for engine in self._engines:
            if engine.news_blocked:
                self._block(engine, now)

    def _block(self, engine: Engine, until_s: float) -> None:
        """Note that messages of the engine cannot reach the routers until this time."""
        self._blocked_until[engine.name] = max(until_s, self._blocked_until.get(engine.name, 0.0))

    def _engine(self, name: str) -> Engine:
        return next(engine for engine in self._engines if engine.name == name)

    @staticmethod
    def _lossless(engine: Engine, excused: set[str]) -> bool:
        return engine.kind is not Kind.PLAIN and engine.name not in excused

    @staticmethod
    async def _until(reached: Callable[[], bool], patience_s: float) -> bool:
        give_up_s = time.monotonic() + patience_s
        while not reached():
            if time.monotonic() > give_up_s:
                return False
            await asyncio.sleep(SAMPLE_S)
        return True

    def _fail(self, text: str, once: str = "") -> None:
        """Record a failure.

        Args:
            text: The failure.
            once: A name; only the first failure with this name is recorded, as later ones repeat it.
        """
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
    """Choose two or three kinds of engines, so that each fault of the plan can hit at least one."""
    kinds = [Kind.STOCK, Kind.PLAIN, Kind.PATCHED]
    rng.shuffle(kinds)
    if rng.random() < 0.3:
        shorter = kinds[:2]
        if all(not fault.kinds or fault.kinds & set(shorter) for fault in plan):
            return shorter
    return kinds


def _shape(rng: random.Random, geometry: Geometry, plan: list[Fault], kind: Kind) -> Shape:
    """Choose the sizes of an engine, with pools far too small for the prompts, so that evictions never end."""
    special: dict[str, int] = {"http": rng.randrange(2)}
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
