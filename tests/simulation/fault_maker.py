# SPDX-License-Identifier: Apache-2.0
"""The effects of faults: each method of `FaultMaker` is named like the kind of the faults that it makes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from kvrouter.router.base.common.ids import WorkerKey
from tests.simulation.engine import Server
from tests.simulation.faults import Fault
from tests.simulation.laws import DEAF_S
from tests.simulation.network import Cut
from tests.simulation.router import Router
from tests.simulation.router_settings import changed
from tests.simulation.store.store import Former
from tests.simulation.written import MOMENTS

if TYPE_CHECKING:
    from tests.simulation.world import World

# In a rolling restart, how long each router is away, and the most that is waited until it serves.
AWAY_S = (0.2, 3.0)
SERVES_WITHIN_S = 10.0
# How often it is looked whether it serves.
LOOK_S = 1.0
# How long a router stands still at most until others have its workers, and how often that is looked at.
TAKEN_WITHIN_S = 10.0
RELAY_LOOK_S = 0.1
# How soon after the start of a router another one is stopped that it replaces, and how long after the end of its own
# former process it starts: others have its workers then.
SURGE_S = 1.0
SURGE_AFTER_S = 2.0
# Up to this draw, an engine dies with its machine, which says nothing.
SILENT_DEATHS = 0.4
# How much longer engines are idle than other faults last.
IDLE_TIMES = 3
# The share of routers that follow a new primary although the former one still serves.
FOLLOWING_SHARE = 0.4
# How far behind a replica is that lacks an engine's last step.
MOST_LAG_S = 4.0
# From this draw on, a crash loses what was written just now, however few writes it was to lose.
CERTAIN_LOSS = 0.3


class FaultMaker:
    """The maker of the faults of one world, which also ends them."""

    def __init__(self, world: World) -> None:
        self._loop, self._network, self._note, self._rng = world.loop, world.network, world.note, world.rng
        self._store, self._routers, self._servers, self._engines = (
            world.store,
            world.routers,
            world.servers,
            world.engines,
        )
        self._laws, self._operator, self._clients = world.laws, world.operator, world.clients
        self._observer = world.observer
        self._is_quiet = False

    def begin(self, fault: Fault) -> None:
        """Begin a fault."""
        self._note("world", str(fault))
        self._observer.fault_begins(fault.kind, fault.first, fault.second)
        if fault.loses_data:
            self._laws.store_loses(fault.seconds)
        if fault.disturbs_all:
            self._disturb(fault.seconds)
        getattr(self, f"_{fault.kind}")(fault)

    def _router(self, name: str) -> Router:
        return next(router for router in self._routers if router.name == name)

    def _server(self, name: str) -> Server:
        return next(server for server in self._servers if server.name == name)

    def _later(self, fault: Fault, what: str, call: object) -> None:
        def end() -> None:
            if not self._is_quiet:
                self._note("world", f"end of fault {fault.number}: {what}")
                call()  # type: ignore[operator]

        self._loop.after(fault.seconds, end)

    def _engine_restart(self, fault: Fault) -> None:
        server = self._server(fault.first)
        if server.is_up:
            server.die(silently=fault.draw < SILENT_DEATHS)
            self._loop.after(max(1.0, fault.seconds), server.begin)

    def _engine_stopped(self, fault: Fault) -> None:
        self._set(fault, "is_stopped", True, False)

    def _engine_mute(self, fault: Fault) -> None:
        self._set(fault, "is_mute", True, False)

    def _engine_slow(self, fault: Fault) -> None:
        self._set(fault, "slow_s", 5 * fault.draw, 0.0)

    def _set(self, fault: Fault, name: str, value: object, after: object) -> None:
        """Set an attribute of all cores of a server until the end of the fault."""
        engines = self._server(fault.first).engines

        def end() -> None:
            for engine in engines:
                setattr(engine, name, after)

        for engine in engines:
            setattr(engine, name, value)
        self._later(fault, f"{name} {after}", end)

    def _engine_flood(self, fault: Fault) -> None:
        for engine in self._server(fault.first).engines:
            for _ in range(60):
                engine.publish()

    def _engine_idle(self, fault: Fault) -> None:
        """Let an engine compute nothing after one more step."""
        engines = self._server(fault.first).engines
        for engine in engines:
            engine.publish()
        silent = self._laws.written.silent
        silent.update(engine.worker for engine in engines)
        fault = dataclasses.replace(fault, seconds=IDLE_TIMES * fault.seconds)
        self._set(fault, "is_idle", True, False)
        self._loop.after(fault.seconds, lambda: silent.difference_update(engine.worker for engine in engines))

    def _engine_last_lost(self, fault: Fault) -> None:
        """Let an engine compute nothing after one more step, and put a replica in the store's place that lacks that step."""
        before = self._laws.written.writes
        self._engine_idle(fault)

        def lose() -> None:
            if not self._is_quiet:
                self._laws.store_loses(fault.seconds)
                self._disturb(fault.seconds)
                self._fail_over(fault, self._laws.written.writes - before)

        self._loop.after(self._rng.uniform(0.0, MOST_LAG_S), lose)

    def _engine_unreported(self, fault: Fault) -> None:
        """Let the patch miss the next step that changes something."""
        for engine in self._server(fault.first).engines:
            engine.is_unreported = True

    def _router_kill(self, fault: Fault) -> None:
        router = self._router(fault.first)
        router.kill(silently=fault.draw < 0.3)
        self._later(fault, "starts again", router.start)

    def _router_stop(self, fault: Fault) -> None:
        self._stop(self._router(fault.first), fault.seconds)

    def _stop(self, router: Router, seconds: float) -> None:
        """Stop a router in order, and start it after some seconds."""
        router.stop()

        def start() -> None:
            if router.process is not None and router.core is None:
                # A process that does not end in time is killed.
                router.kill()
            router.start()

        self._loop.after(seconds, start)

    def _router_pause(self, fault: Fault) -> None:
        router = self._router(fault.first)
        router.pause()

        def go_on() -> None:
            self._clients.end_at(router)
            router.resume()

        self._later(fault, "goes on", go_on)

    def _router_relay(self, fault: Fault) -> None:
        """Let a router stand still until others have its workers, and go on as these stop."""
        router = self._router(fault.first)
        if router.core is None:
            return
        taken = self._held(router)
        router.pause()
        until_s = self._loop.time() + TAKEN_WITHIN_S

        def look() -> None:
            if self._is_quiet:
                return
            others = [(other, taken & self._held(other)) for other in self._routers if other is not router]
            if {worker for _, workers in others for worker in workers} < taken and self._loop.time() < until_s:
                self._loop.after(RELAY_LOOK_S, look)
                return
            for other, workers in others:
                if workers:
                    self._loop.after(self._rng.uniform(0.0, 1.0), partial(self._stop, other, fault.seconds))
            self._loop.after(1.0 + self._rng.uniform(0.0, 0.2), router.resume)

        look()

    def _held(self, router: Router) -> set[WorkerKey]:
        followers = {} if router.core is None else router.core.registry.followers
        return {worker for worker, follower in followers.items() if follower.lease.held}

    def _power(self, fault: Fault) -> None:
        """Kill all routers and the store at once."""
        for router in self._routers:
            router.kill(silently=True)
        self._store.crash(self._lost_writes(fault), silently=True)
        self._later(fault, "the store is back", lambda: self._restore(fault))
        for router in self._routers:
            self._loop.after(self._rng.uniform(0.0, fault.seconds + 2.0), router.start)

    def _lost_writes(self, fault: Fault) -> int:
        """Return how many writes the store loses."""
        just = self._laws.written.since(MOMENTS)
        return max(fault.lost_writes, just if fault.draw >= CERTAIN_LOSS else 0)

    def _restore(self, fault: Fault) -> None:
        self._store.restart(with_data=fault.draw < 0.7, loading_s=fault.draw if fault.draw < 0.3 else 0.0)

    def _store_crash(self, fault: Fault) -> None:
        if self._store.is_up:
            self._store.crash(self._lost_writes(fault), silently=fault.draw < 0.2)
            self._later(fault, "the store is back", lambda: self._restore(fault))

    def _store_failover(self, fault: Fault) -> None:
        self._fail_over(fault, self._lost_writes(fault))

    def _fail_over(self, fault: Fault, lost_writes: int) -> None:
        former = list(Former)[int(fault.draw * len(Former))]
        self._note("store", f"the former primary is {former.value}")
        self._store.failover(lost_writes, former)
        for router in self._routers if former is Former.SERVING else ():
            # Some of the clients follow the new primary at once.
            if self._rng.random() < FOLLOWING_SHARE:
                self._network.drop_connections(router.host, self._store.host)
        self._later(fault, "the former primary ends", lambda: self._store.run(self._store.store.end_former))

    def _store_flush(self, fault: Fault) -> None:
        if self._store.is_up:
            self._store.run(self._store.store.flushall)

    def _store_evicts(self, fault: Fault) -> None:
        if self._store.is_up:
            gone = self._store.run(self._store.store.evict, 1 + int(3 * fault.draw))
            self._note("store", f"evicts {b' '.join(gone).decode()}")

    def _store_stopped(self, fault: Fault) -> None:
        self._store.run(self._store.store.stop)
        self._later(fault, "the store goes on", lambda: self._store.run(self._store.store.resume))

    def _store_full(self, fault: Fault) -> None:
        store = self._store.store
        fill, free = (store.fill, store.drain) if fault.draw < 0.5 else (store.fill_disk, store.free_disk)
        self._store.run(fill)
        self._later(fault, "the store takes writes", lambda: self._store.run(free))

    def _link_cut(self, fault: Fault) -> None:
        first, second = self._network.hosts[fault.first], self._network.hosts[fault.second]
        how = Cut.SILENT if fault.draw < 0.7 else Cut.RESET
        self._network.cut(first, second, how)
        for engine in self._engines:
            if engine.host is second:
                # Packets that TCP sends again after a silence may take as long as the silence did.
                deaf_s = min(2 * fault.seconds, DEAF_S)
                before_s = self._laws.deaf_until_s.get(engine.name, 0.0)
                self._laws.deaf_until_s[engine.name] = max(before_s, self._loop.time() + deaf_s)
        self._later(fault, "is whole", lambda: self._network.heal(first, second))

    def _link_reset(self, fault: Fault) -> None:
        self._network.drop_connections(self._network.hosts[fault.first], self._network.hosts[fault.second])

    def _link_hang(self, fault: Fault) -> None:
        """Let one of the router's connections to the store stay open, and bring nothing more, as behind a firewall."""
        ends = [
            end.peer
            for end in self._network.hosts[fault.first].ends
            if end.peer.host is self._store.host and end.peer.is_open
        ]
        if ends:
            ends[int(fault.draw * len(ends))].vanish()

    def _operator_rolling_restart(self, fault: Fault) -> None:
        """Stop and start one router after the other, perhaps as an upgrade to the present version."""
        rng, waiting = self._rng, self._rng.sample(self._routers, len(self._routers))

        def restart() -> None:
            if self._is_quiet or not waiting:
                return
            router = waiting.pop()
            self._note("world", f"fault {fault.number} restarts {router.name}")
            router.is_old = router.is_old and fault.draw < 0.5
            away_s = rng.uniform(*AWAY_S)
            self._stop(router, away_s)
            until_s = self._loop.time() + away_s + SERVES_WITHIN_S
            self._loop.after(away_s, lambda: go_on(router, until_s))

        def go_on(router: Router, until_s: float) -> None:
            if router.core is not None or self._loop.time() > until_s:
                restart()
            else:
                self._loop.after(LOOK_S, lambda: go_on(router, until_s))

        restart()

    def _operator_surge(self, fault: Fault) -> None:
        """Start a router in a slow network, and stop another one, which it replaces, as soon as it begins."""
        new, old = self._rng.sample(self._routers, 2)
        new.kill()

        def start() -> None:
            if not self._is_quiet:
                self._slow_down(fault, SURGE_S)
                new.start()
                self._loop.after(self._rng.uniform(0.0, SURGE_S), lambda: self._stop(old, fault.seconds))

        self._loop.after(max(SURGE_AFTER_S, fault.seconds / 3), start)

    def _operator_drain(self, fault: Fault) -> None:
        self._change(fault, is_draining=True)
        self._later(fault, "is active again", lambda: self._change(fault, is_draining=False))

    def _operator_move(self, fault: Fault) -> None:
        self._change(fault, is_moved=fault.draw < 0.6)

    def _operator_remove(self, fault: Fault) -> None:
        self._change(fault, is_wanted=False)
        self._later(fault, "is registered again", lambda: self._change(fault, is_wanted=True))

    def _change(self, fault: Fault, **changes: bool) -> None:
        engine = next(engine for engine in self._engines if engine.name == fault.first)
        # A removal deletes what routers wrote of the worker.
        self._laws.store_loses(0.0)
        self._operator.want(engine.worker, **changes)

    def _operator_settings(self, fault: Fault) -> None:
        router = self._router(fault.first)
        if router.core is not None:
            router.apply(changed(router.config, self._rng))

    def _network_slow(self, fault: Fault) -> None:
        self._slow_down(fault, fault.seconds)

    def _slow_down(self, fault: Fault, seconds: float) -> None:
        self._network.slowness = 1 + 50 * fault.draw
        self._disturb(seconds)
        fault = dataclasses.replace(fault, seconds=seconds)
        self._later(fault, "the network is fast", lambda: setattr(self._network, "slowness", 1.0))

    def _disturb(self, seconds: float) -> None:
        """Note that the store or the whole network is disturbed for some time."""
        self._clients.disturbed_s = max(self._clients.disturbed_s, self._loop.time() + seconds)

    def quieten(self) -> None:
        """End all faults."""
        self._is_quiet = self._clients.is_quiet = True
        self._note("world", "-- quiet")
        network = self._network
        network.slowness = 1.0
        for first in network.hosts.values():
            for second in network.hosts.values():
                network.heal(first, second)
        store = self._store.store
        # The former primary ends, and a registration that faults undid is made again, which deletes what was written.
        self._laws.store_loses(0.0)
        for end in (store.drain, store.free_disk, store.resume, store.end_former):
            self._store.run(end)
        self._store.restart(with_data=True)
        for server in self._servers:
            server.quieten()
        self._operator.quieten()
        for router in self._routers:
            router.resume()
            if router.process is not None and router.core is None and router.started_s < self._loop.time() - 10.0:
                router.kill()
            router.start()
