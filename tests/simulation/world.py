# SPDX-License-Identifier: Apache-2.0
"""One world: routers, engines and a store from a seed, with random faults and a quiet end.

The seed decides everything: the fleet, the faults, and the order of all steps. `without` leaves faults out, to find the
few that matter.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvrouter.router.index.store import checkpoint
from kvrouter.router.model.workers.stream_state import StreamState
from tests.simulation.aim import Aim
from tests.simulation.clients import CALM_S, CLIENT, Clients
from tests.simulation.coverage import Coverage, Observer
from tests.simulation.engine import Kind, Server
from tests.simulation.fault_maker import FaultMaker
from tests.simulation.faults import Fault, plan
from tests.simulation.following import FOLLOWED_S
from tests.simulation.http import HttpClient
from tests.simulation.laws import QUIET_S, Broken, Laws
from tests.simulation.network import Network
from tests.simulation.operator import Operator
from tests.simulation.router import HistoryHandler, Router
from tests.simulation.router_settings import FleetSettings
from tests.simulation.store_server import StoreServer
from tests.simulation.virtual_loop import Stuck, VirtualLoop

__all__ = ["Fault", "Outcome", "World", "run_world"]

# The time with faults, after CALM_S, and the steps that a second of virtual time may take.
FAULTS_S = 60.0
MOST_STEPS_PER_S = 100_000
# How often the slow laws are judged, and how often the quiet end is looked at before it is judged.
LOOK_S = 1.0
QUIET_LOOKS = 7
# How long all routers may take to know that a worker is drained, or removed.
KNOWN_S = 10.0
# Batches for which all routers must have shown a worker live in the end; an engine sends two a second then.
LAST_BATCHES = 6
ROUTERS = (2, 2, 2, 3, 3, 4, 5)
SERVERS = (1, 2, 3)
KINDS = (Kind.STOCK, Kind.STOCK, Kind.PATCHED, Kind.PATCHED, Kind.PLAIN)
# The shares of worlds whose processes run their ready callbacks in any order, of worlds whose routers have lists of
# workers, and of worlds in which some routers are of an older version.
SHUFFLED_SHARE = 0.5
LISTED_SHARE = 0.2
OLD_SHARE = 0.2
# The name of the host of clients.
CLIENTS = "clients"
# The share of worlds in which clients reach some routers over HTTP.
HTTP_WORLDS_SHARE = 0.2
# The shares of engines and routers with an HTTP address, of engines with two ranks, and of those that come late; the last
# comes at LATEST_S.
HTTP_SHARE = 0.7
RANKS_SHARE = 0.2
LATE_SHARE = 0.2
LATEST_S = 40.0


@dataclass
class Outcome:
    """The end of one world."""

    seed: int
    digest: str
    # The broken law, or "".
    problem: str
    simulated_s: float
    steps: int
    judgements: int
    faults: list[Fault] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)


class World:
    """One world."""

    def __init__(self, seed: int, without: Collection[int] = ()) -> None:
        self.seed = seed
        rng = random.Random(f"world {seed}")
        self.rng = rng
        self._without = frozenset(without)
        self.history: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.loop = loop = VirtualLoop(self._new_rng(), shuffles=rng.random() < SHUFFLED_SHARE)
        self.network = loop.network = Network(loop, self._new_rng())
        self.store = StoreServer(loop, self.network.add_host("store", "10.0.0.1"), self._new_rng())
        self._settings = settings = FleetSettings(self._new_rng())
        self.routers = self._make_routers(settings)
        self.servers = self._make_servers()
        self.engines = [engine for server in self.servers for engine in server.engines]
        self.laws = Laws(loop, self.engines, self.routers, self.store)
        self.observer = Observer(self.engines, self.routers)
        self.observer.on_memory = self.laws.written.judge_memory
        for router in self.routers if rng.random() < HTTP_WORLDS_SHARE else ():
            router.has_http = rng.random() < HTTP_SHARE
        has_lists = rng.random() < LISTED_SHARE
        self.operator = Operator(loop, self.routers, self.engines, self._new_rng(), self.note, has_lists=has_lists)
        self.clients = Clients(
            loop,
            self.routers,
            self.engines,
            self.laws,
            self.operator,
            self._new_rng(),
            HttpClient(self.network, self.network.add_host(CLIENTS, "10.0.3.1")),
            self.note,
            self._count,
        )
        if has_lists:
            for router in rng.sample(self.routers, rng.randint(1, len(self.routers))):
                router.listed = ()
        if rng.random() < OLD_SHARE:
            for router in rng.sample(self.routers, rng.randint(1, len(self.routers))):
                router.is_old = True
        hosts, names = [server.name for server in self.servers], [engine.name for engine in self.engines]
        self.faults = plan(
            self._new_rng(),
            [router.name for router in self.routers],
            hosts,
            names,
            [CLIENTS] if any(router.has_http for router in self.routers) else [],
            CALM_S,
            CALM_S + FAULTS_S,
        )
        self._aim = Aim(loop, self.observer, self.laws.written, self.faults, self._new_rng(), CALM_S + FAULTS_S)

    def _make_routers(self, settings: FleetSettings) -> list[Router]:
        hosts = [
            self.network.add_host(name, f"10.0.2.{number}")
            for number, name in enumerate("abcde"[: self.rng.choice(ROUTERS)], 1)
        ]
        return [
            Router(host.name, self.loop, host, self.store.host.address, self._new_rng(), self.note, settings)
            for host in hosts
        ]

    def _make_servers(self) -> list[Server]:
        rng = self.rng
        return [
            Server(
                f"e{number}",
                rng.choice(KINDS),
                self.network,
                self.network.add_host(f"e{number}", f"10.0.1.{number}"),
                self._new_rng(),
                self.note,
                has_http=rng.random() < HTTP_SHARE,
                ranks=2 if rng.random() < RANKS_SHARE else 1,
            )
            for number in range(rng.choice(SERVERS))
        ]

    def _new_rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def note(self, who: str, text: str) -> None:
        """Add a line to the history."""
        line = f"{self.loop.time() - 1_000.0:10.4f} {who:5} {text}"
        self.history.append(line)
        self._count(line)
        self.laws.take_line(who, text)

    def _count(self, text: str) -> None:
        self._hash.update(text.encode())

    # -- a run

    def run(self) -> Outcome:
        """Run to the quiet end or to the first broken law."""
        problem = ""
        with self._alone(), self.observer.watching():
            try:
                self._run()
            except (Broken, Stuck) as error:
                problem = str(error)
                self.note("LAW", problem)
        loop = self.loop
        self._count(f"{loop.steps} {loop.time()} {loop.rng.random()} {self.rng.random()}")
        return Outcome(
            self.seed, self._hash.hexdigest(), problem, loop.time() - 1_000.0, loop.steps, self.laws.judgements,
            self.faults, self.history, self.laws.states, self.observer.end(self.history),
        )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Make nothing outside the world matter: the collector, the log, chance, and when checkpoints are due."""
        gc.disable()
        random.seed(self.seed)
        tail_blocks, checkpoint.TAIL_BLOCKS = checkpoint.TAIL_BLOCKS, self._settings.tail_blocks
        log = logging.getLogger("kvrouter")
        handler = HistoryHandler(self.note)
        level, propagates = log.level, log.propagate
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            with self.loop:
                yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagates
            checkpoint.TAIL_BLOCKS = tail_blocks
            gc.enable()

    def _run(self) -> None:
        loop, rng, maker = self.loop, self.rng, FaultMaker(self)
        self.note("world", f"seed {self.seed}: {self._description()}")
        for router in self.routers:
            loop.after(rng.uniform(0.0, 2.0), router.start)
        for server in self.servers:
            begins_s = rng.uniform(2.0, LATEST_S) if rng.random() < LATE_SHARE else rng.uniform(0.0, 2.0)
            loop.after(begins_s, server.begin)
            # An engine is registered before it starts, or after.
            registers_s = max(0.0, begins_s + rng.uniform(-2.0, 2.0))
            for engine in server.engines:
                loop.after(registers_s, partial(self.operator.want, engine.worker, is_wanted=True))
        self.operator.look_always()
        self.clients.begin()
        for fault in self.faults:
            if fault.number not in self._without:
                loop.after(fault.at_s, partial(self._aim.begin, fault, partial(maker.begin, fault)))
        self._go(CALM_S + FAULTS_S)
        maker.quieten()
        for _ in range(QUIET_LOOKS):
            self._go(LOOK_S)
            self._note_rounds()
        # Requests of clients that were under way have their answers by now.
        self.clients.end_all()
        self._wait(self.laws.unfollowed, FOLLOWED_S)
        self._wait(self._unfinished, QUIET_S)
        for router in self.routers:
            self.laws.judge(router, whole=True)
        self.laws.judge_end(self.clients.reserved, self.history)
        worker = rng.choice(self.engines).worker
        self.operator.want(worker, is_draining=True)
        self._wait(self.operator.unfinished, KNOWN_S)
        self.laws.store_loses(0.0)
        self.operator.want(worker, is_wanted=False)
        self._wait(self.operator.unfinished, KNOWN_S)
        # A router that no longer shows the worker still deletes its index.
        self._go(LOOK_S)
        self.laws.judge_followers()

    def _wait(self, unfinished: Callable[[], str], most_s: float) -> None:
        """Run until nothing is unfinished. Raises Broken if that takes too long."""
        waited_s = 0.0
        while problem := unfinished():
            if waited_s >= most_s:
                raise Broken(f"{problem}, after {most_s:.0f} s without faults")
            self._go(LOOK_S)
            self._note_rounds()
            waited_s += LOOK_S
        self.note("world", f"whole again after {waited_s:.0f} s")

    def _unfinished(self) -> str:
        """Return what is not as it should be in the end, or ""."""
        for engine in self.engines:
            if engine.life is None or engine.life.next_seq < engine.first_quiet + LAST_BATCHES:
                return f"followers: {engine.name} was not live everywhere for the last {LAST_BATCHES} batches"
        return self.laws.unfinished() or self.operator.unfinished()

    def _note_rounds(self) -> None:
        """Note from which batch on blocks must be credited if there is no replay: once all routers show a live worker.

        Until then a router may begin to read again. A block of which an engine had several copies before that is gone for
        the router when the first of them is removed.
        """
        for engine in self.engines:
            cores = [router.core for router in self.routers]
            followers = [None if core is None else core.registry.followers.get(engine.worker) for core in cores]
            epochs = tuple(
                follower.state.shown.epoch
                for follower in followers
                if follower is not None and follower.state.view.state is StreamState.LIVE
            )
            if len(epochs) < len(followers) or epochs != engine.followed:
                engine.followed = epochs
                engine.first_quiet = 0 if engine.life is None else engine.life.next_seq

    def _description(self) -> str:
        routers = ", ".join(
            " ".join(
                (
                    router.name,
                    *("old",) * router.is_old,
                    *("http",) * router.has_http,
                    *("listed",) * (router.listed is not None),
                )
            )
            for router in self.routers
        )
        servers = ", ".join(
            f"{server.name} {server.kind.value}{' http' if server.has_http else ''} x{len(server.engines)}"
            for server in self.servers
        )
        agreement = "settings that differ" if self.routers[0].settings.disagrees else "equal settings"
        return f"{routers}; {servers}; {agreement}, {'any order' if self.loop.shuffles else 'the order of asyncio'}"

    def _go(self, seconds: float) -> None:
        """Run for a time; the slow laws are judged now and then."""
        end_s = self.loop.time() + seconds
        while (left_s := end_s - self.loop.time()) > 0:
            span_s = min(left_s, LOOK_S)
            most = int(MOST_STEPS_PER_S * span_s) + 1_000
            self.loop.run_for(span_s, after_step=self._after_step, most_steps=most)
            for router in self.routers:
                self.laws.judge_load(router)
                if router.process is not None:
                    tasks = sum(task.get_name() != CLIENT for task in self.loop.tasks_of(router.process))
                    self.laws.judge_bounds(router, tasks)
            self.laws.judge_agreement()
            self.laws.judge_fleet()

    def _after_step(self) -> None:
        self.laws.after_step()
        if self.loop.errors:
            error = self.loop.errors[0]
            if isinstance(law := error.get("exception"), Broken):
                raise law
            raise Broken(f"error: {error.get('message')}: {error.get('exception')!r}")


def run_world(seed: int, without: Collection[int] = ()) -> Outcome:
    """Run one world in this process."""
    return World(seed, without).run()
