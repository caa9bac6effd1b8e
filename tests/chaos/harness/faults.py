# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault: what it does, for how long, and how it ends. Each is drawn from the schedule's own chance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from kvrouter.simulator.cache.hashing import DEFAULT_SEED
from kvrouter.simulator.cache.shapes import gemma3, gpt_oss, llama, qwen3_next
from tests.chaos.harness.engines import Engine
from tests.chaos.harness.publisher import Replay
from tests.chaos.harness.scene import LONG_S, SHORT_S, Fault, Scene
from tests.chaos.harness.shape import Kind

# Far longer than leases, than any timeout, and than doubt is credited.
SILENT_S = 30.0
# Longer than ZMQ's longest pause between two connections.
RECONNECTED_S = 2.5
HOUR_S = 3_600.0
# What an engine may be restarted with; the seeds are those that a router tries by itself.
LAYOUTS = (
    llama(),
    llama(block_size=32),
    gemma3(window=64, sliding_groups=2),
    gemma3(window=32, sliding_groups=2),
    gpt_oss(window=32),
    gpt_oss(block_size=32, window=64),
    qwen3_next(block_size=16, mamba_groups=2),
)
HASH_SEEDS = (DEFAULT_SEED, "0")

OnEngine: TypeAlias = Callable[[Scene, Engine], Awaitable[None]]
OnScene: TypeAlias = Callable[[Scene], Awaitable[None]]

FAULTS: dict[str, Fault] = {}
TOPIC = frozenset({Kind.STOCK, Kind.PLAIN})
ALL = frozenset(Kind)


def _on(kinds: frozenset[Kind], **shape: int) -> Callable[[OnEngine], OnEngine]:
    def add(act: OnEngine) -> OnEngine:
        name = act.__name__
        FAULTS[name] = Fault(name, act, kinds, shape)
        return act

    return add


def _shared(act: OnScene) -> OnScene:
    FAULTS[act.__name__] = Fault(act.__name__, act)
    return act


@_on(TOPIC)
async def batches_unsent(scene: Scene, engine: Engine) -> None:
    """PUB drops some; the replay ring has them."""
    if engine.publisher is not None:
        engine.publisher.unsent = scene.rng.randint(1, 8)
    await scene.pause(0.1, 0.5)
    _heal(engine)


@_on(TOPIC)
async def batches_lost(scene: Scene, engine: Engine) -> None:
    """Seqs used up with nothing behind them, as after a failed encode."""
    scene.excused.add(engine.name)
    if engine.publisher is not None:
        engine.publisher.lost = scene.rng.randint(1, 4)
    await scene.pause(0.1, 0.5)
    _heal(engine)


@_on(TOPIC)
async def batches_doubled(scene: Scene, engine: Engine) -> None:
    if engine.publisher is not None:
        engine.publisher.doubled = scene.rng.randint(1, 20)
    await scene.pause(0.1, 0.8)
    _heal(engine)


@_on(TOPIC)
async def batches_swapped(scene: Scene, engine: Engine) -> None:
    if engine.publisher is not None:
        engine.publisher.swapped = scene.rng.randint(1, 4)
    await scene.pause(0.1, 0.8)
    _heal(engine)


@_on(TOPIC, hwm=5)
async def high_water_mark(scene: Scene, engine: Engine) -> None:
    """The reader's side stands still until PUB drops."""
    engine.events.stall()
    for _ in range(60):
        if engine.replica is not None:
            engine.step()
        await asyncio.sleep(0.005)
    engine.events.heal()
    await scene.pause(0.1, 0.3)


@_on(frozenset({Kind.PATCHED}), report_queue=4)
async def reports_dropped(scene: Scene, engine: Engine) -> None:
    """The reporter's queue is full."""
    engine.stall_reporter(0.4)
    await scene.pause(0.4, 0.8)


@_on(ALL)
async def wire_delay(scene: Scene, engine: Engine) -> None:
    delay_s = scene.rng.uniform(0.02, 0.3)
    for wire in engine.wires:
        wire.delay_s = delay_s
    await scene.pause()
    _heal(engine)


@_on(ALL)
async def wire_cut(scene: Scene, engine: Engine) -> None:
    """All connections break; new ones are refused for a while."""
    for wire in engine.wires:
        wire.refusing = True
        wire.cut()
    await scene.pause(0.0, LONG_S)
    _heal(engine)


@_on(ALL)
async def wire_half_open(scene: Scene, engine: Engine) -> None:
    """Connections stand, and what is sent vanishes."""
    for wire in engine.wires:
        wire.swallowing = True
    await scene.pause(0.5, 2 * LONG_S)
    _heal(engine)


@_on(ALL)
async def wire_stall(scene: Scene, engine: Engine) -> None:
    """As when the engine's host is stopped and goes on: all comes late, nothing is lost."""
    for wire in engine.wires:
        wire.stall()
    await scene.pause(0.3, 2 * LONG_S)
    _heal(engine)


@_on(ALL)
async def wire_narrow(scene: Scene, engine: Engine) -> None:
    rate = scene.rng.uniform(4_000, 40_000)
    for wire in engine.wires:
        wire.rate_bytes_s = rate
    await scene.pause()
    _heal(engine)


@_on(ALL)
async def engine_restart(scene: Scene, engine: Engine) -> None:
    """kill -9, and a new life behind the same addresses."""
    await engine.stop()
    await scene.pause(0.0, 0.8)
    await engine.start()


@_on(ALL)
async def restart_with_another_layout(scene: Scene, engine: Engine) -> None:
    """The next life has other groups, block sizes or windows, or another hash seed."""
    await engine.stop()
    others = [geometry for geometry in LAYOUTS if geometry != engine.shape.geometry]
    engine.change_layout(scene.rng.choice(others), scene.rng.choice(HASH_SEEDS))
    await scene.pause(0.0, 0.8)
    await engine.start()


@_on(ALL)
async def restart_past_the_old_seq(scene: Scene, engine: Engine) -> None:
    """The new life has said more than the old one before the router hears of it."""
    await _restart_unheard(scene, engine, scene.rng.randint(1, 6))


@_on(ALL, http=1)
async def restart_at_the_old_seq(scene: Scene, engine: Engine) -> None:
    """The new life's next batch has just the seq that the old one's would have had.

    With HTTP: of a PLAIN engine without it, the next seq is all the proof that there is
    (docs/reference/states.md).
    """
    await _restart_unheard(scene, engine, 0)


@_on(ALL)
async def engine_stopped(scene: Scene, engine: Engine) -> None:
    """The engine's threads stand still; its sockets do not."""
    engine.stall(True)
    stop_s = scene.rng.uniform(0.3, LONG_S)
    engine.stall_reporter(stop_s)
    await asyncio.sleep(stop_s)
    engine.stall(False)


@_on(frozenset({Kind.STOCK}))
async def replay_gone(scene: Scene, engine: Engine) -> None:
    engine.replay.refusing = True
    engine.replay.cut()
    await _miss_some(scene, engine)
    _heal(engine)


@_on(frozenset({Kind.STOCK}), ring=12)
async def replay_ring_short(scene: Scene, engine: Engine) -> None:
    scene.excused.add(engine.name)
    engine.events.refusing = True
    engine.events.cut()
    for _ in range(scene.rng.randint(1, 12)):
        if engine.replica is not None:
            engine.step()
    _heal(engine)
    await scene.pause(0.2, 0.6)


@_on(frozenset({Kind.STOCK}))
async def replay_slow(scene: Scene, engine: Engine) -> None:
    scene.excused.add(engine.name)
    engine.replay.delay_s = scene.rng.uniform(0.1, 1.0)
    engine.replay.rate_bytes_s = scene.rng.uniform(20_000, 200_000)
    await _miss_some(scene, engine)
    await scene.pause()
    _heal(engine)


@_on(frozenset({Kind.STOCK}))
async def replay_lies(scene: Scene, engine: Engine) -> None:
    scene.excused.add(engine.name)
    publisher = engine.publisher
    if publisher is not None:
        publisher.replay = scene.rng.choice([mode for mode in Replay if mode is not Replay.HONEST])
        scene.said(f"{engine.name}: replay is {publisher.replay.value}")
    if scene.rng.random() < 0.5:
        engine.events.cut()
    await _miss_some(scene, engine)
    await scene.pause()
    _heal(engine)


@_on(frozenset({Kind.PATCHED}))
async def snapshot_cut(scene: Scene, engine: Engine) -> None:
    """The answer to a snapshot request breaks off; the reports before it were lost, so that one is wanted."""
    engine.requests.cut_after_bytes = scene.rng.randint(1, 3_000)
    engine.requests.cut()
    engine.reports.swallowing = True
    await scene.pause(0.1, 0.5)
    engine.reports.heal()
    await scene.pause()
    _heal(engine)


@_on(frozenset({Kind.PATCHED}))
async def heartbeats_lost(scene: Scene, engine: Engine) -> None:
    """No report comes, while requests are answered."""
    engine.reports.swallowing = True
    await scene.pause(0.5, 2 * LONG_S)
    _heal(engine)


@_on(frozenset({Kind.PATCHED}))
async def patch_restart(scene: Scene, engine: Engine) -> None:
    """The patch alone starts again, as after a failed plugin: the engine's cache is full and the ledger empty."""
    await engine.stop()
    await engine.start(patched=False)
    await scene.pause(0.1, 0.6)
    await engine.stop()
    await engine.start()


@_shared
async def clock_jump(scene: Scene) -> None:
    """The router's clock goes an hour forward or back."""
    assert scene.router is not None
    scene.router.clock.offset_s += scene.rng.choice((-HOUR_S, HOUR_S))
    await scene.pause()


@_shared
async def store_restart(scene: Scene) -> None:
    """kill -9, and back with what was on disk: up to a second is lost."""
    scene.valkey.kill()
    await scene.pause(0.0, 1.0)
    await scene.valkey.start()


@_shared
async def store_restart_empty(scene: Scene) -> None:
    scene.valkey.kill(keep_data=False)
    await scene.pause(0.0, 1.0)
    await scene.valkey.start()


@_shared
async def store_flushed(scene: Scene) -> None:
    await scene.valkey.ask("FLUSHALL")
    await scene.pause()


@_shared
async def store_stopped(scene: Scene) -> None:
    """SIGSTOP for seconds, past the lease half of the time."""
    scene.valkey.stop()
    await scene.pause(0.3, 4.0)
    scene.valkey.go_on()


@_shared
async def store_silent(scene: Scene) -> None:
    """SIGSTOP for half a minute."""
    scene.valkey.stop()
    await scene.pause(SILENT_S, SILENT_S)
    scene.valkey.go_on()


@_shared
async def store_full(scene: Scene) -> None:
    """maxmemory with noeviction: writes are refused, reads are not."""
    await scene.valkey.ask("CONFIG", "SET", "maxmemory", "1")
    await scene.pause(0.3, 2.0)
    await scene.valkey.ask("CONFIG", "SET", "maxmemory", "0")


@_shared
async def store_slow(scene: Scene) -> None:
    """Every command waits, again and again."""
    for _ in range(scene.rng.randint(2, 6)):
        pause_ms = scene.rng.randint(50, 500)
        if scene.rng.random() < 0.5:
            await scene.valkey.ask("CLIENT", "PAUSE", pause_ms, "ALL")
        else:
            await scene.valkey.ask("DEBUG", "SLEEP", pause_ms / 1_000)
        await scene.pause(0.0, 0.2)
    await scene.valkey.ask("CLIENT", "UNPAUSE")


@_shared
async def store_connections_killed(scene: Scene) -> None:
    for _ in range(scene.rng.randint(3, 20)):
        await scene.valkey.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await scene.pause(0.0, 0.1)


def _heal(engine: Engine) -> None:
    for wire in engine.wires:
        wire.heal()
    if engine.publisher is not None:
        engine.publisher.behave()


async def _restart_unheard(scene: Scene, engine: Engine, further: int) -> None:
    """further: batches more than the old life had; of both streams, where there are two, the event topic counts."""
    engine.loaded = False
    # What was said has arrived: the router waits for this seq.
    await asyncio.sleep(SHORT_S)
    old = engine.publisher.next_seq if engine.publisher is not None else 0
    for wire in engine.wires:
        wire.refusing = True
        wire.cut()
    await engine.stop()
    await engine.start()
    assert engine.publisher is not None
    while engine.publisher.next_seq < old + further:
        if engine.publisher.next_seq < old + further - 8:
            engine.step()
        else:
            engine.small_step()
        await asyncio.sleep(0)
    await scene.pause(0.0, 0.5)
    _heal(engine)
    # The subscription stands before the next batch is said, or that one would be missed too.
    await asyncio.sleep(RECONNECTED_S)
    engine.loaded = True


async def _miss_some(scene: Scene, engine: Engine) -> None:
    if engine.publisher is not None:
        engine.publisher.unsent = scene.rng.randint(1, 4)
    await scene.pause()
