# SPDX-License-Identifier: Apache-2.0
"""A schedule with routers as processes, which are killed and restarted, stopped, or cut off from the store.

The harness sees a process only through its API: it judges the answers in tokens, and after the last fault it compares
the sets in the store block by block.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import httpx

from kvrouter.router.base.common.ids import Place as RouterPlace
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.log_follower import BLOCK_S, SILENT_S
from kvrouter.simulator.cache.hit import find_prefix
from kvrouter.simulator.cache.pool import Block, BlockPool
from tests.chaos.harness.engines import MODEL, Engine
from tests.chaos.harness.faults import FAULTS
from tests.chaos.harness.history import Held
from tests.chaos.harness.oracle import NEWS_S, admissible
from tests.chaos.harness.process_router import LEASE_S, ProcessRouter
from tests.chaos.harness.scene import Scene
from tests.chaos.harness.stage import AFTER_S, BEFORE_S, HOPELESS_S, LIVE, SAMPLE_S, START_S, Stage
from tests.chaos.harness.tiers import short
from tests.support.stored_residency import place_keys, residency_of
from tests.support.wire import Wire

ROUTER_KILLED, ROUTER_STOPPED, ROUTER_CUT_OFF = "router_killed", "router_stopped", "router_cut_off"
STORE_HANGS, ROUTER_REFUSES = "store_hangs", "router_refuses"
PROCESS_FAULTS = (ROUTER_KILLED, ROUTER_STOPPED, ROUTER_CUT_OFF, STORE_HANGS, ROUTER_REFUSES)
# Number of routers by fault; two for all other faults.
ROUTERS = {ROUTER_KILLED: 1, STORE_HANGS: 3}
# From a short pause to one far longer than a lease and than a suspect worker keeps its credit.
HANG_FIRST_S, HANG_LAST_S = 2.0, 30.0
# How long a router that refuses all workers stays: long enough for routers to hand it workers, and to notice workers
# that nobody follows.
REFUSES_FIRST_S, REFUSES_LAST_S = 2.0, 5.0
REFUSED_HOSTS = "10.0.0.0/8"
# Further delay that is allowed because all processes share one machine.
LATE_S = 1.0

# Faults that may happen to the engines while a router is down, stopped or cut off.
MEANWHILE = (
    "engine_restart",
    "restart_past_the_old_seq",
    "restart_at_the_old_seq",
    "batches_unsent",
    "batches_lost",
    "store_restart",
    "wire_cut",
)


# How long a router may take to notice that the store is silent: one blocking read, and the silence allowed after it.
UNHEARD_S = BLOCK_S + SILENT_S


class _HeldPool:
    """The blocks that an engine held at some moment, with the interface of its block pool."""

    def __init__(self, held: Held) -> None:
        self.null = Block(0)
        self._held = held

    def find(self, group_ids: tuple[int, ...], block_hash: bytes) -> list[Block] | None:
        wanted = short(block_hash)
        if all(wanted in self._held.get((group_idx, "GPU", None), ()) for group_idx in group_ids):
            return [Block(1)] * len(group_ids)
        return None


class ProcessSchedule(Stage):
    """A schedule with faults of the routers' processes and of their connections to the store."""

    async def _play(self) -> None:
        count = ROUTERS.get(self.outcome.fault, 2)
        self._wires = [Wire() for _ in range(count)]
        for wire in self._wires:
            wire.target = self._valkey.port
            await wire.open()
        routers = [
            ProcessRouter(f"router{i}", self._folder, f"redis://127.0.0.1:{wire.port}/0")
            for i, wire in enumerate(self._wires)
        ]
        self._excused: set[str] = set()
        # When any router last showed each engine's state wrongly, or not settled.
        self._wrong_s: dict[str, float] = {}
        self._shown: dict[tuple[str, str], tuple[object, ...]] = {}
        try:
            await asyncio.gather(*(router.open() for router in routers))
            await self._open_engines([FAULTS[name] for name in MEANWHILE])
            for router in routers:
                for engine in self._engines:
                    await router.register(engine)
            watching = [asyncio.ensure_future(self._watch(router)) for router in routers]
            try:
                await self._until_live(routers, START_S)
                await asyncio.sleep(BEFORE_S)
                scene = Scene(self._rng, self._engines, self._valkey, None, self._say, self._excused)
                for _ in range(self._rng.randint(1, 2)):
                    await self._act(scene, routers)
                ended_s = time.monotonic()
                self._say("the last fault has ended")
                await asyncio.sleep(AFTER_S)
                await self._until_live(routers, self._settle_s / 2)
                for engine in self._engines:
                    engine.loaded = False
                await self._settle(routers)
                self.outcome.recovered_s += [
                    max(0.0, self._wrong_s.get(engine.name, 0.0) - ended_s) for engine in self._engines
                ]
            finally:
                for task in watching:
                    task.cancel()
                ends = await asyncio.gather(*watching, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end
        finally:
            await asyncio.gather(*(router.close() for router in routers))
            await asyncio.gather(*(wire.close() for wire in self._wires))

    async def _act(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        acts = {
            ROUTER_KILLED: self._kill,
            ROUTER_STOPPED: self._stop,
            ROUTER_CUT_OFF: self._cut_off,
            STORE_HANGS: self._hang,
            ROUTER_REFUSES: self._refuse,
        }
        await acts[self.outcome.fault](scene, routers)

    async def _hang(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        """Stop the store with SIGSTOP under traffic, so that no router learns of another one's commits."""
        self.outcome.faults += 1
        hang_s = self._rng.uniform(HANG_FIRST_S, HANG_LAST_S)
        self._say(f"fault {STORE_HANGS} for {hang_s:.1f} s")
        self._valkey.stop()
        await asyncio.sleep(hang_s)
        self._valkey.go_on()
        self._say("the store goes on")

    async def _refuse(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        """Start a further router that may connect to no engine, and check that it does not disturb the others."""
        self.outcome.faults += 1
        url = f"redis://127.0.0.1:{self._wires[0].port}/0"
        refuser = ProcessRouter("refuser", self._folder, url, {"KVROUTER_ALLOW_HOSTS": REFUSED_HOSTS})
        self._say(f"fault {ROUTER_REFUSES}")
        try:
            await refuser.open()
            await asyncio.sleep(self._rng.uniform(REFUSES_FIRST_S, REFUSES_LAST_S))
            await self._until_live(routers, self._settle_s / 2)
            for router in routers:
                for name, row in (await router.rows()).items():
                    if not (_settled(row) and row["credited"]):
                        self._fail(
                            f"{router.name}: {name} is {row['state']} beside a router that refuses it ({row['reason']})"
                        )
            for name, row in (await refuser.rows()).items():
                if row["state"] != "down" or row["credited"]:
                    self._fail(f"the router that refuses {name} shows it as {row['state']}")
            if self._rng.random() < 0.5:
                await refuser.kill()
        finally:
            await refuser.close()
        self._say("it is gone")

    async def _kill(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        self.outcome.faults += 1
        (router,) = routers
        self._say(f"fault {ROUTER_KILLED}")
        await router.kill()
        await asyncio.gather(self._meanwhile(scene), asyncio.sleep(self._rng.uniform(0.0, 2 * LEASE_S)))
        await router.open()
        self._say("the router is back")

    async def _stop(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        self.outcome.faults += 1
        router = self._rng.choice(routers)
        self._say(f"fault {ROUTER_STOPPED}: {router.name}")
        router.stop()
        await asyncio.gather(self._meanwhile(scene), asyncio.sleep(self._rng.uniform(0.5 * LEASE_S, 4 * LEASE_S)))
        now = time.monotonic()
        for engine in self._engines:
            self._block(engine, now)
        router.go_on()
        self._say(f"{router.name} goes on")

    async def _cut_off(self, scene: Scene, routers: list[ProcessRouter]) -> None:
        """Drop all bytes between one router and the store.

        Both routers still read the engines, and the other one takes over the workers.
        """
        self.outcome.faults += 1
        number = self._rng.randrange(len(routers))
        self._say(f"fault {ROUTER_CUT_OFF}: {routers[number].name}")
        self._wires[number].swallowing = True
        noticed_s = time.monotonic() + UNHEARD_S
        for engine in self._engines:
            self._block(engine, noticed_s)
        await asyncio.gather(self._meanwhile(scene), asyncio.sleep(self._rng.uniform(0.5 * LEASE_S, 12 * LEASE_S)))
        self._wires[number].heal()
        self._say(f"{routers[number].name} reaches the store again")

    async def _meanwhile(self, scene: Scene) -> None:
        if self._rng.random() < 0.7:
            await self._hit(scene, FAULTS[self._rng.choice(MEANWHILE)])

    async def _watch(self, router: ProcessRouter) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._note_blocked(time.monotonic())
            if not router.up:
                continue
            engine = self._rng_free_choice()
            tokens = engine.prompts[self.outcome.samples % len(engine.prompts)]
            requested_s = time.monotonic()
            try:
                before = await router.rows()
                hits = await router.gpu_hits(tokens)
                after = await router.rows()
            except (httpx.TransportError, httpx.HTTPStatusError):
                # The router has just been killed or stopped, or has just started and has no workers yet.
                continue
            for name in before.keys() & hits.keys() & after.keys():
                self._look(router, self._engine(name), tokens, before[name], hits[name], after[name])
                self._look_how_old(router, self._engine(name), before[name], after[name], requested_s)

    def _rng_free_choice(self) -> Engine:
        # The engines are chosen in turn, not at random: the number of samples depends on time, and must not change the
        # random choices of the seed.
        return self._engines[self.outcome.samples // 7 % len(self._engines)]

    def _look(
        self,
        router: ProcessRouter,
        engine: Engine,
        tokens: list[int],
        before: dict[str, Any],
        hit: int,
        after: dict[str, Any],
    ) -> None:
        now = time.monotonic()
        self.outcome.samples += 1
        shown = (after["state"], after["reason"], after["epoch"])
        if self._shown.get((router.name, engine.name)) != shown:
            self._shown[router.name, engine.name] = shown
            self._say(
                f"{router.name}: {engine.name} {after['state']} at seq {after['seq']} of {after['epoch']}: {after['reason']}"
            )
        if not _settled(after):
            self._wrong_s[engine.name] = now
        if (
            hit == 0
            or before["seq"] is None
            or after["seq"] is None
            or before["epoch"] != after["epoch"]
            or before["state"] != after["state"]
        ):
            return
        best = 0
        for life in engine.history.lives:
            if admissible(life, now, self._blocked_until.get(engine.name, 0.0)):
                for seq in range(before["seq"], after["seq"] + 1):
                    held = life.at(seq)
                    best = max(best, 0 if held is None else _true_hit(engine, held, tokens))
        if hit > best:
            self._wrong_s[engine.name] = now
            size = engine.shape.geometry.hash_block_size
            self.outcome.ghosts_during[after["state"]] += -(-(hit - best) // size)
            if after["state"] in LIVE:
                self._fail(
                    f"{router.name} promises {hit} tokens of {engine.name} where {best} were held, live at seq {before['seq']} to "
                    f"{after['seq']}; the engine is at {[(life.stream, life.last_seq) for life in engine.history.current]}",
                    once=f"{router.name} {engine.name}",
                )

    def _look_how_old(
        self, router: ProcessRouter, engine: Engine, before: dict[str, Any], after: dict[str, Any], requested_s: float
    ) -> None:
        """Check that a live worker shows messages that are two seconds old, whatever the store does."""
        undisturbed = self.outcome.fault in (STORE_HANGS, ROUTER_REFUSES) and not engine.news_blocked
        if not undisturbed or not (_settled(before) and _settled(after)) or before["epoch"] != after["epoch"]:
            return
        ages_s = [
            life.behind_s(after["seq"], requested_s)
            for life in engine.history.current
            if life.at(after["seq"]) is not None
        ]
        if ages_s and min(ages_s) > NEWS_S:
            self.outcome.behind += 1
            if min(ages_s) > NEWS_S + LATE_S:
                self._fail(
                    f"{router.name}: {engine.name} is live at seq {after['seq']}, and what followed is {min(ages_s):.1f} s old",
                    once=f"{router.name} {engine.name} old",
                )

    async def _until_live(self, routers: list[ProcessRouter], patience_s: float) -> None:
        give_up_s = time.monotonic() + patience_s
        while time.monotonic() < give_up_s:
            try:
                rows = [await router.rows() for router in routers]
            except httpx.TransportError:
                rows = []
            complete = rows and all(len(by_worker) == len(self._engines) for by_worker in rows)
            if complete and all(_settled(row) for by_worker in rows for row in by_worker.values()):
                return
            await asyncio.sleep(SAMPLE_S)

    async def _settle(self, routers: list[ProcessRouter]) -> None:
        patience_s = HOPELESS_S if self.outcome.failures else self._settle_s
        give_up_s = time.monotonic() + patience_s
        while True:
            problems = [problem for router in routers for problem in await self._problems(router)]
            if not problems:
                break
            if time.monotonic() > give_up_s:
                for problem in problems:
                    self._fail(f"not settled after {patience_s:g} s: {problem}")
                break
            await asyncio.sleep(10 * SAMPLE_S)
        for engine in self._engines:
            ghosts, lost = await self._compare(engine)
            self.outcome.ghosts_after += ghosts
            self.outcome.lost_after[engine.kind.value] += lost
        for router in routers:
            if not self.outcome.failures:
                await self._ask(router)

    async def _problems(self, router: ProcessRouter) -> list[str]:
        try:
            rows = await router.rows()
        except httpx.TransportError as error:
            return [f"{router.name} does not answer: {error!r}"]
        problems = []
        for engine in self._engines:
            row = rows.get(engine.name)
            if row is None:
                problems.append(f"{router.name} does not know {engine.name}")
                continue
            ghosts, lost = await self._compare(engine)
            ends = [life.last_seq for life in engine.history.current]
            wrong = ghosts or (lost and self._lossless(engine, self._excused))
            if wrong or not _settled(row) or row["seq"] not in ends:
                engine.say_something()
                problems.append(
                    f"{router.name}: {engine.name} is {row['state']} at seq {row['seq']} ({row['reason']}) with {ghosts} ghosts "
                    f"and {lost} lost blocks; the engine is at {ends}"
                )
        return problems

    async def _compare(self, engine: Engine) -> tuple[int, int]:
        """Compare the store with the engine's blocks, and return the numbers of ghosts and of lost blocks."""
        worker = WorkerKey(MODEL, engine.name)
        held = {keys.place_text(RouterPlace(*place)): blocks for place, blocks in engine.held().items()}
        ask, tag = self._valkey.ask, f"{keys.PREFIX}{keys.worker_tag(worker)}"
        meta = await ask("HGETALL", f"{tag}:meta")
        stored = {place: await ask("GET", key) for place, key in place_keys(tag, meta).items()}
        log = await ask("XRANGE", f"{tag}:log", "-", "+")
        residency = residency_of(meta, stored, log)
        ghosts = lost = 0
        for place in held.keys() | residency.keys():
            stored_blocks, engine_blocks = residency.get(place, set()), held.get(place, frozenset())
            ghosts += len(stored_blocks - engine_blocks)
            lost += len(engine_blocks - stored_blocks)
        return ghosts, lost

    async def _ask(self, router: ProcessRouter) -> None:
        for engine in self._engines:
            _, lost = await self._compare(engine)
            for tokens in engine.prompts:
                hit = (await router.gpu_hits(tokens))[engine.name]
                true_hit = _true_hit(engine, engine.held(), tokens)
                if hit > true_hit or (hit < true_hit and not lost):
                    self._fail(
                        f"{router.name}: {hit} tokens of a prompt promised of {engine.name}, {true_hit} would be reused"
                    )


def _settled(row: dict[str, Any]) -> bool:
    return row["seq"] is not None and row["state"] in LIVE


def _true_hit(engine: Engine, held: Held, tokens: list[int]) -> int:
    pool = cast(BlockPool, _HeldPool(held))
    return find_prefix(pool, engine.shape.geometry, engine.hashes(tokens), len(tokens) - 1).tokens
