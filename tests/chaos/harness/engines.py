# SPDX-License-Identifier: Apache-2.0
"""A simulated engine under load, behind proxies.

It has the simulator's block pool, tiers below it, and one or both event streams. There are three kinds: STOCK has
vLLM's topic and a replay endpoint, PLAIN only the topic, and PATCHED the topic and the engine patch's real reporter.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.engine_patch.setup.settings import ReporterSettings
from kvrouter.events.patch.messages import (
    ReportCleared,
    ReportEvent,
    ReportRemoved,
    ReportStored,
    pack_hashes,
)
from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.wire import WireEvent, WireRemoved, WireStored
from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.hashing import DEFAULT_SEED, extend_hashes, root_hash
from kvrouter.simulator.cache.pool import Cleared, Removed, Stored
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.engine.replica import Replica
from kvrouter.simulator.http.event_stream import to_wire
from tests.chaos.harness.history import Held, History, Life, Place
from tests.chaos.harness.publisher import ANY_PORT, ChaosPublisher
from tests.chaos.harness.pulse import PulseServer
from tests.chaos.harness.shape import Kind, Shape
from tests.chaos.harness.tiers import Moved, Tiers, short
from tests.support.wire import Wire

# Time between two looks for replay requests; vLLM needs up to 100 ms.
TURN_S = 0.005
# Mean time between two steps of an engine; short enough that every fault hits a moving stream.
STEP_S = 0.03
HEARTBEAT_S = 0.1
CHUNK_TOKENS = 64
# Interval of the batches of an engine without load, which has no other way to prove its stream.
SPEAK_EVERY_S = 1.0
RESET_SHARE = 0.01
OFFLOAD_SHARE = 0.5
MODEL = "chaos"

Context = zmq.Context[zmq.Socket[bytes]]


class ProxiedReporter(Reporter):
    """A reporter that names its proxy's endpoint, not its own, to readers that request its endpoint."""

    def __init__(self, public: str, **arguments: Any) -> None:
        self._public = public
        self.bound = ""
        super().__init__(**arguments)

    @property
    def reports_endpoint(self) -> str:
        return self._public

    @reports_endpoint.setter
    def reports_endpoint(self, bound: str) -> None:
        self.bound = bound


class Engine:
    """One replica, under load from `open` to `close`; faults are its methods and its wires' attributes."""

    def __init__(
        self, name: str, kind: Kind, shape: Shape, *, context: Context, rng: random.Random, clock: Callable[[], float]
    ) -> None:
        self.name, self.kind, self.shape = name, kind, shape
        self.history = History()
        self.events, self.replay, self.requests, self.reports = Wire(), Wire(), Wire(), Wire()
        self.http = Wire()
        self._pulse: PulseServer | None = None
        self.loaded = True
        self.paused = False
        self.steps = 0
        self._spoke_s = 0.0
        self._context, self._rng, self._clock = context, rng, clock
        self.publisher: ChaosPublisher | None = None
        self.reporter: ProxiedReporter | None = None
        self.replica: Replica | None = None
        self._tiers = Tiers(0, 0, rng)
        self._stock_life: Life | None = None
        self._report_life: Life | None = None
        self._reported = 0
        self._last: Held = {}
        self._task: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self._hash_seed = DEFAULT_SEED
        self.prompts = shape.prompts(rng)
        self._hashes: dict[tuple[int, ...], list[bytes]] = {}

    @property
    def wires(self) -> list[Wire]:
        return [self.events, self.replay, self.requests, self.reports, self.http]

    @property
    def news_blocked(self) -> bool:
        """Whether the engine's messages may be unable to reach the router now."""
        return self.paused or self.replica is None or any(wire.impaired for wire in self.wires)

    @property
    def url(self) -> str | None:
        return f"http://127.0.0.1:{self.http.port}" if self.shape.http else None

    def registration(self) -> dict[str, Any]:
        """Return the body of a `POST /register`."""
        body: dict[str, Any] = {
            "worker_id": self.name,
            "model": MODEL,
            "endpoint": self.events.endpoint,
            "patch_endpoint": self.requests.endpoint if self.kind is Kind.PATCHED else "off",
            "catalog": {"offload_blocks_per_chunk": 1},
        }
        if self.kind is Kind.STOCK:
            body["replay_endpoint"] = self.replay.endpoint
        return body if self.url is None else body | {"url": self.url}

    async def open(self) -> None:
        for wire in self.wires:
            await wire.open()
        await self.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.stop()
        for wire in self.wires:
            await wire.close()
        if self._failed is not None:
            raise self._failed

    async def start(self, *, patched: bool = True) -> None:
        """Start the engine with an empty cache, behind the same addresses."""
        shape = self.shape
        # Like vLLM, it answers no HTTP before it can serve. The kernel reports start times in hundredths of a second.
        self._pulse = PulseServer(round(time.time(), 2))
        await self._pulse.open()
        self.http.target = self._pulse.port
        self.publisher = ChaosPublisher(self._context, replay=self.kind is Kind.STOCK, ring=shape.ring, hwm=shape.hwm)
        self.replica = Replica(
            shape.geometry,
            shape.gpu_blocks,
            on_step=self._on_step,
            chunk_tokens=CHUNK_TOKENS,
            hash_seed=self._hash_seed,
        )
        self._tiers = Tiers(shape.cpu_blocks, shape.disk_blocks, self._rng)
        self._last = {}
        self._stock_life = self.history.begin("stock")
        self.events.target = self.publisher.port
        self.replay.target = self.publisher.replay_port
        if self.kind is Kind.PATCHED and patched:
            self._start_reporter()

    async def stop(self) -> None:
        """Kill the engine as by SIGKILL: every connection breaks, and no further message is sent."""
        for wire in self.wires:
            wire.target = None
            wire.cut()
        if self._pulse is not None:
            await self._pulse.close()
            self._pulse = None
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
        self.replica = None
        self.history.end(self._clock())
        self._report_life = None
        reporter, self.reporter = self.reporter, None
        if reporter is not None:
            # Its `close` waits for its thread, which may be stalled.
            await asyncio.to_thread(reporter.close)

    def _start_reporter(self) -> None:
        self._reported = 0
        self.reporter = ProxiedReporter(
            self.reports.endpoint,
            requests=ANY_PORT,
            reports=ANY_PORT,
            settings=ReporterSettings(heartbeat_s=HEARTBEAT_S, max_queue_size=self.shape.report_queue),
            context=self._context,
            wall_clock=time.time,
            clock=time.monotonic,
            new_epoch=lambda: secrets.token_hex(8),
            patch_version="chaos",
        )
        self.reporter.declare(self.shape.catalog(self._hash_seed))
        self._report_life = self.history.begin("reports")
        self.requests.target = _port(self.reporter.requests_endpoint)
        self.reports.target = _port(self.reporter.bound)

    def change_layout(self, geometry: Geometry, hash_seed: str) -> None:
        """Let the next life have the groups of this geometry and this hash seed."""
        blocks_a_group = self.shape.gpu_blocks // len(self.shape.geometry.groups)
        self.shape = replace(self.shape, geometry=geometry, gpu_blocks=blocks_a_group * len(geometry.groups))
        self._hash_seed = hash_seed
        self.prompts = self.shape.prompts(self._rng)
        self._hashes.clear()

    def stall(self, stalled: bool) -> None:
        """Stall the engine's own threads, or end the stall; a stalled engine makes no step, replay or HTTP answer."""
        self.paused = stalled
        if self._pulse is not None:
            self._pulse.stalled = stalled

    def stall_reporter(self, stall_s: float) -> None:
        """Stall the reporter's thread for this long, so that heartbeats and answers fail and its queue fills."""

        def slow() -> list[ReportEvent]:
            time.sleep(stall_s)
            return []

        if self.reporter is not None:
            self._report(slow)

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Return the block hashes of a prompt, cached because the oracle needs them again and again."""
        cached = self._hashes.setdefault(tuple(tokens), [])
        extend_hashes(cached, tokens, self.shape.geometry.hash_block_size, root_hash(self._hash_seed))
        return cached

    def step(self) -> None:
        """Serve one request, or reset the cache."""
        assert self.replica is not None
        self.steps += 1
        if self._rng.random() < RESET_SHARE:
            self.replica.reset_prefix_cache()
        self.replica.run(self._rng.choice(self.prompts), max_tokens=self._rng.randint(1, 3))

    def small_step(self) -> None:
        """Serve a new prompt of one block, which sends one batch if the groups allow it."""
        assert self.replica is not None
        size = self.shape.geometry.scheduler_block_size
        self.replica.run([self._rng.randrange(30_000) for _ in range(size + 1)])

    def say_something(self) -> None:
        """Send one more batch from time to time, as only a batch proves a stream without replay."""
        now = self._clock()
        if self.kind is Kind.PLAIN and self.replica is not None and now - self._spoke_s > SPEAK_EVERY_S:
            self._spoke_s = now
            self.small_step()

    def held(self) -> Held:
        """Return the blocks that the engine could reuse now, by place."""
        if self.replica is None:
            return {}
        blocks_by_place: dict[Place, set[int]] = {}
        for key in self.replica.pool.resident():
            blocks_by_place.setdefault((key.group_idx, "GPU", None), set()).add(short(key.block_hash))
        blocks_by_place.update(self._tiers.held())
        # Unchanged places share their sets with the last result, because a history is long.
        held: dict[Place, frozenset[int]] = {}
        for place, blocks in blocks_by_place.items():
            before = self._last.get(place)
            held[place] = before if before is not None and before == blocks else frozenset(blocks)
        self._last = held
        return held

    async def _run(self) -> None:
        next_step_s = 0.0
        try:
            while True:
                if self.replica is not None and not self.paused:
                    assert self.publisher is not None
                    self.publisher.serve()
                    now = self._clock()
                    if self.loaded and now >= next_step_s:
                        self.step()
                        next_step_s = now + STEP_S * self._rng.uniform(0.5, 1.5)
                await asyncio.sleep(TURN_S)
        except Exception as error:
            # `close` raises it, because a schedule without load would prove nothing.
            self._failed = error

    def _on_step(self, events: list[CacheEvent]) -> None:
        assert self.publisher is not None and self._stock_life is not None
        wire: list[WireEvent] = []
        report: list[ReportEvent] = []
        for event in events:
            wire.append(to_wire(event, self.shape.geometry))
            self._translate(event, report)
            if isinstance(event, Stored):
                for block_hash in event.hashes:
                    if self._rng.random() < OFFLOAD_SHARE:
                        self._tiers.offload(event.group_idx, block_hash)
            for move in self._tiers.take_moves():
                wire.append(_wire_move(move))
                report.append(_report_move(move))
        held = self.held()
        self._stock_life.note(self.publisher.publish(encode_batch(time.time(), wire, 0)), held, self._clock())
        if self.reporter is not None:
            self._report(lambda: report)

    def _report(self, make: Callable[[], Any]) -> None:
        assert self.reporter is not None and self._report_life is not None
        self._report_life.note(self._reported, self._last, self._clock())
        self.reporter.publish(make, self._reported)
        self._reported += 1

    def _translate(self, event: CacheEvent, report: list[ReportEvent]) -> None:
        if isinstance(event, Cleared):
            # Stock vLLM does not say which medium it clears, so all of them are cleared; the patch reports each one.
            for medium in ("CPU", "STORAGE"):
                self._tiers.clear(medium)
            report += [ReportCleared(medium, "reset") for medium in ("GPU", "CPU", "STORAGE")]
        elif isinstance(event, Stored):
            size = self.shape.geometry.groups[event.group_idx].block_size
            report.append(ReportStored(pack_hashes(map(short, event.hashes)), event.group_idx, "GPU", size))
        elif isinstance(event, Removed):
            report.append(ReportRemoved(pack_hashes([short(event.key.block_hash)]), event.key.group_idx, "GPU"))


def _wire_move(move: Moved) -> WireEvent:
    if move.stored:
        return WireStored(
            [move.block_hash], None, [], 0, None, move.medium, None, group_idx=move.group_idx, ownership=move.owner
        )
    return WireRemoved([move.block_hash], move.medium, move.group_idx, ownership=move.owner)


def _report_move(move: Moved) -> ReportEvent:
    packed = pack_hashes([short(move.block_hash)])
    if move.stored:
        return ReportStored(packed, move.group_idx, move.medium, 0, ownership=move.owner)
    return ReportRemoved(packed, move.group_idx, move.medium, ownership=move.owner)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
