# SPDX-License-Identifier: Apache-2.0
"""All kinds of faults, each as a function that causes the fault, waits, and ends it.

Their random choices come from the schedule's seed.
"""

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

# Far longer than a lease, than any timeout, and than a suspect worker keeps its credit.
SILENT_S = 30.0
# Longer than ZMQ's longest pause before it connects again.
RECONNECTED_S = 2.5
HOUR_S = 3_600.0
# Layouts that an engine may be restarted with, and the hash seeds that a router tries by itself.
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
    """Let PUB drop some batches; the replay ring has them."""
    if engine.publisher is not None:
        engine.publisher.unsent = scene.rng.randint(1, 8)
    await scene.pause(0.1, 0.5)
    _heal(engine)


@_on(TOPIC)
async def batches_lost(scene: Scene, engine: Engine) -> None:
    """Use up some seqs without a batch, as after a failed encode."""
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
    """Stall the reader's side until PUB drops batches."""
    engine.events.stall()
    for _ in range(60):
        if engine.replica is not None:
            engine.step()
        await asyncio.sleep(0.005)
    engine.events.heal()
    await scene.pause(0.1, 0.3)


@_on(frozenset({Kind.PATCHED}), report_queue=4)
async def reports_dropped(scene: Scene, engine: Engine) -> None:
    """Stall the reporter until its queue is full and it drops reports."""
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
    """Cut all connections, and refuse new ones for a while."""
    for wire in engine.wires:
        wire.refusing = True
        wire.cut()
    await scene.pause(0.0, LONG_S)
    _heal(engine)


@_on(ALL)
async def wire_half_open(scene: Scene, engine: Engine) -> None:
    """Keep the connections open, and drop all bytes on them."""
    for wire in engine.wires:
        wire.swallowing = True
    await scene.pause(0.5, 2 * LONG_S)
    _heal(engine)


@_on(ALL)
async def wire_stall(scene: Scene, engine: Engine) -> None:
    """Delay all messages without losing one, as if the engine's host were stopped and resumed."""
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
    """Kill the engine and start it again behind the same addresses."""
    await engine.stop()
    await scene.pause(0.0, 0.8)
    await engine.start()


@_on(ALL)
async def restart_with_another_layout(scene: Scene, engine: Engine) -> None:
    """Restart the engine with other groups, block sizes or windows, and perhaps another hash seed."""
    await engine.stop()
    others = [geometry for geometry in LAYOUTS if geometry != engine.shape.geometry]
    engine.change_layout(scene.rng.choice(others), scene.rng.choice(HASH_SEEDS))
    await scene.pause(0.0, 0.8)
    await engine.start()


@_on(ALL)
async def restart_past_the_old_seq(scene: Scene, engine: Engine) -> None:
    """Restart the engine, which has sent more batches than in its old life before the router learns of the restart."""
    await _restart_unheard(scene, engine, scene.rng.randint(1, 6))


@_on(ALL, http=1)
async def restart_at_the_old_seq(scene: Scene, engine: Engine) -> None:
    """Restart the engine, whose next batch then has exactly the seq that the router expects from the old life.

    The engine has HTTP, because without it the next seq would be the only proof of a PLAIN engine
    (docs/reference/states.md).
    """
    await _restart_unheard(scene, engine, 0)


@_on(ALL)
async def engine_stopped(scene: Scene, engine: Engine) -> None:
    """Stall the engine's threads, but not its sockets."""
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
    """Break off the answer to a snapshot request; lose the reports before it, so that the router wants a snapshot."""
    engine.requests.cut_after_bytes = scene.rng.randint(1, 3_000)
    engine.requests.cut()
    engine.reports.swallowing = True
    await scene.pause(0.1, 0.5)
    engine.reports.heal()
    await scene.pause()
    _heal(engine)


@_on(frozenset({Kind.PATCHED}))
async def heartbeats_lost(scene: Scene, engine: Engine) -> None:
    """Drop all reports and heartbeats, while requests are still answered."""
    engine.reports.swallowing = True
    await scene.pause(0.5, 2 * LONG_S)
    _heal(engine)


@_on(frozenset({Kind.PATCHED}))
async def patch_restart(scene: Scene, engine: Engine) -> None:
    """Restart without the patch, as after a failed plugin, and then with it.

    While the patch is missing, the engine's cache fills.
    """
    await engine.stop()
    await engine.start(patched=False)
    await scene.pause(0.1, 0.6)
    await engine.stop()
    await engine.start()


@_shared
async def clock_jump(scene: Scene) -> None:
    """Move the router's clock an hour forward or back."""
    assert scene.router is not None
    scene.router.clock.offset_s += scene.rng.choice((-HOUR_S, HOUR_S))
    await scene.pause()


@_shared
async def store_restart(scene: Scene) -> None:
    """Kill the store and start it with its data on disk; up to a second of writes is lost."""
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
    """Stop the store with SIGSTOP for some seconds, in half of the cases past the lease."""
    scene.valkey.stop()
    await scene.pause(0.3, 4.0)
    scene.valkey.go_on()


@_shared
async def store_silent(scene: Scene) -> None:
    """Stop the store with SIGSTOP for half a minute."""
    scene.valkey.stop()
    await scene.pause(SILENT_S, SILENT_S)
    scene.valkey.go_on()


@_shared
async def store_full(scene: Scene) -> None:
    """Let the store reach maxmemory with noeviction: it refuses writes, but not reads."""
    await scene.valkey.ask("CONFIG", "SET", "maxmemory", "1")
    await scene.pause(0.3, 2.0)
    await scene.valkey.ask("CONFIG", "SET", "maxmemory", "0")


@_shared
async def store_slow(scene: Scene) -> None:
    """Pause the store several times, so that every command waits."""
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
    """Restart the engine, and let the router learn of it only when the new life has sent enough batches.

    Args:
        scene: The scene of the fault.
        engine: The engine.
        further: How many batches more than the old life the new one sends first, counted on the engine's own topic.
    """
    engine.loaded = False
    # Wait until the sent batches have arrived, so that the router expects the next seq.
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
    # The router must have subscribed again before the next batch, or it would miss that one too.
    await asyncio.sleep(RECONNECTED_S)
    engine.loaded = True


async def _miss_some(scene: Scene, engine: Engine) -> None:
    if engine.publisher is not None:
        engine.publisher.unsent = scene.rng.randint(1, 4)
    await scene.pause()
