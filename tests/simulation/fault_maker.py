# SPDX-License-Identifier: Apache-2.0
"""The effects of faults: each method of `FaultMaker` is named like the kind of the faults that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.engine import Server
from tests.simulation.faults import Fault
from tests.simulation.laws import DEAF_S
from tests.simulation.network import Cut
from tests.simulation.router import Router
from tests.simulation.router_settings import changed
from tests.simulation.store.store import Former

if TYPE_CHECKING:
    from tests.simulation.world import World

# In a rolling restart, how long each router is away, and the most that is waited until it serves.
AWAY_S = (0.2, 3.0)
SERVES_WITHIN_S = 10.0
# How often it is looked whether it serves.
LOOK_S = 1.0


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
        if not fault.spares_routers:
            self._disturb(fault.seconds)
        getattr(self, f"_{fault.kind}")(fault)

    def _router(self, name: str) -> Router:
        return next(router for router in self._routers if router.name == name)

    def _server(self, name: str) -> Server:
        return next(server for server in self._servers if server.name == name)

    def _disturb(self, seconds: float) -> None:
        """Note that routers or their ways to the store are disturbed for some time."""
        self._clients.disturbed_s = max(self._clients.disturbed_s, self._loop.time() + seconds)

    def _later(self, fault: Fault, what: str, call: object) -> None:
        def end() -> None:
            if not self._is_quiet:
                self._note("world", f"end of fault {fault.number}: {what}")
                call()  # type: ignore[operator]

        self._loop.after(fault.seconds, end)

    def _engine_restart(self, fault: Fault) -> None:
        server = self._server(fault.first)
        if server.is_up:
            server.die(silently=fault.draw < 0.2)
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
        self._later(fault, "goes on", router.resume)

    def _power(self, fault: Fault) -> None:
        """Kill all routers and the store at once."""
        for router in self._routers:
            router.kill(silently=True)
        self._store.crash(fault.lost_writes, silently=True)
        self._later(fault, "the store is back", lambda: self._restore(fault))
        for router in self._routers:
            self._loop.after(self._rng.uniform(0.0, fault.seconds + 2.0), router.start)

    def _restore(self, fault: Fault) -> None:
        self._store.restart(with_data=fault.draw < 0.7, loading_s=fault.draw if fault.draw < 0.3 else 0.0)

    def _store_crash(self, fault: Fault) -> None:
        if self._store.is_up:
            self._store.crash(fault.lost_writes, silently=fault.draw < 0.2)
            self._later(fault, "the store is back", lambda: self._restore(fault))

    def _store_failover(self, fault: Fault) -> None:
        former = list(Former)[int(fault.draw * len(Former))]
        self._note("store", f"the former primary is {former.value}")
        self._store.failover(fault.lost_writes, former)
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
                deaf_s = min(fault.seconds, DEAF_S)
                before_s = self._laws.deaf_until_s.get(engine.name, 0.0)
                self._laws.deaf_until_s[engine.name] = max(before_s, self._loop.time() + deaf_s)
        self._later(fault, "is whole", lambda: self._network.heal(first, second))

    def _link_reset(self, fault: Fault) -> None:
        self._network.drop_connections(self._network.hosts[fault.first], self._network.hosts[fault.second])

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
            self._disturb(away_s + SERVES_WITHIN_S)
            self._stop(router, away_s)
            until_s = self._loop.time() + away_s + SERVES_WITHIN_S
            self._loop.after(away_s, lambda: go_on(router, until_s))

        def go_on(router: Router, until_s: float) -> None:
            if router.core is not None or self._loop.time() > until_s:
                restart()
            else:
                self._loop.after(LOOK_S, lambda: go_on(router, until_s))

        restart()

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
        self._operator.want(engine.worker, **changes)

    def _operator_settings(self, fault: Fault) -> None:
        router = self._router(fault.first)
        if router.core is not None:
            router.apply(changed(router.config, self._rng))

    def _network_slow(self, fault: Fault) -> None:
        self._network.slowness = 1 + 50 * fault.draw
        self._later(fault, "the network is fast", lambda: setattr(self._network, "slowness", 1.0))

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
