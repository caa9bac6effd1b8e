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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvrouter.router.base.common.errors import RouterError, StoreDown, UnknownSelection
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.index.matching.question import Question
from kvrouter.router.route.placement.placement_request import PlacementRequest
from tests.simulation.engine import MODEL, Engine, Kind
from tests.simulation.laws import DEAF_S, QUIET_S, Broken, Laws
from tests.simulation.network import Cut, Network
from tests.simulation.router import HistoryHandler, Router
from tests.simulation.store.store import Former
from tests.simulation.store_server import StoreServer
from tests.simulation.virtual_loop import Stuck, VirtualLoop
from tests.support.model_engine import PROMPT_TOKENS, PROMPTS, TOKENS

# The time for the fleet to start, the time with faults, and the steps that a second of virtual time may take.
CALM_S = 5.0
FAULTS_S = 60.0
MOST_STEPS_PER_S = 100_000
# Clients ask each router a few times a second.
ASK_S = (0.05, 0.5)
REGISTER_RETRY_S = 0.5
# How often an operator looks whether some router knows a worker: a store that lost everything while no router ran lost
# the registrations for good.
REGISTER_AGAIN_S = 5.0
# How often a client repeats the end of a reservation while no router takes it.
END_AGAIN_S = 0.5
# The name of the tasks that clients' requests are.
CLIENT = "client"
# How often the slow laws are judged.
LOOK_S = 1.0
KINDS = (Kind.STOCK, Kind.STOCK, Kind.PATCHED, Kind.PATCHED, Kind.PLAIN)
MOST_LOST_WRITES = 40
# The share of worlds whose processes run their ready callbacks in any order.
SHUFFLED_SHARE = 0.5


@dataclass(frozen=True)
class Fault:
    """One fault: when it begins, what it does to whom, and for how long."""

    number: int
    at_s: float
    kind: str
    first: str
    second: str
    seconds: float
    draw: float

    def __str__(self) -> str:
        whom = " ".join(filter(None, (self.first, self.second)))
        return f"fault {self.number}: {self.kind} {whom} at {self.at_s:.2f} s for {self.seconds:.2f} s"


@dataclass
class Booking:
    """A reservation that a client made at the process with this token."""

    selection_id: str
    router: Router
    token: str
    # How many requests for its release succeeded.
    worker_id: str
    # How many requests for its release succeeded, and whether one got no answer, so that it may have succeeded.
    releases: int = 0
    is_uncertain: bool = False
    # How many requests have no answer yet; those at a router that was killed never get one.
    pending: int = 0
    # How many lives its engine had had: the end of one ends its reservations.
    lives: tuple[int, bool] = (0, False)


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


class World:
    """One world."""

    def __init__(self, seed: int, without: Collection[int] = ()) -> None:
        self.seed = seed
        rng = random.Random(f"world {seed}")
        self._rng = rng
        self._without = frozenset(without)
        self.history: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.loop = loop = VirtualLoop(self._new_rng(), shuffles=rng.random() < SHUFFLED_SHARE)
        self.network = loop.network = Network(loop, self._new_rng())
        self.store = StoreServer(loop, self.network.add_host("store", "10.0.0.1"), self._new_rng())
        self.routers = [
            Router(name, loop, self.network.add_host(name, f"10.0.2.{number}"), "10.0.0.1", self._new_rng(), self.note)
            for number, name in enumerate("abc"[: rng.choice((2, 2, 3))], 1)
        ]
        self.engines = [
            Engine(
                f"e{number}",
                rng.choice(KINDS),
                self.network,
                self.network.add_host(f"e{number}", f"10.0.1.{number}"),
                self._new_rng(),
                self.note,
                has_http=rng.random() < 0.7,
            )
            for number in range(rng.choice((1, 2, 3)))
        ]
        self.laws = Laws(loop, self.engines, self.routers, self.store)
        self.faults = self._plan(self._new_rng())
        self._clients = self._new_rng()
        self._is_quiet = False
        self._bookings: dict[str, Booking] = {}
        # Until when a router or its way to the store was disturbed.
        self.disturbed_s = 0.0
        self.answers = 0

    def _new_rng(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    def note(self, who: str, text: str) -> None:
        """Add a line to the history."""
        line = f"{self.loop.time() - 1_000.0:10.4f} {who:5} {text}"
        self.history.append(line)
        self._hash.update(line.encode())

    # -- a run

    def run(self) -> Outcome:
        """Run to the quiet end or to the first broken law."""
        problem = ""
        with self._alone():
            try:
                self._run()
            except (Broken, Stuck) as error:
                problem = str(error)
                self.note("LAW", problem)
        loop = self.loop
        self._hash.update(f"{loop.steps} {loop.time()} {loop.rng.random()} {self._clients.random()}".encode())
        return Outcome(
            self.seed, self._hash.hexdigest(), problem, loop.time() - 1_000.0, loop.steps, self.laws.judgements,
            self.faults, self.history, self.laws.states,
        )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Make nothing outside the world matter: the collector, the log, and chance."""
        gc.disable()
        random.seed(self.seed)
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
            gc.enable()

    def _run(self) -> None:
        loop = self.loop
        order = "any order" if loop.shuffles else "asyncio's order"
        kinds = ", ".join(
            f"{engine.name} {engine.kind.value}{' http' if engine._has_http else ''}" for engine in self.engines
        )
        self.note("world", f"seed {self.seed}: {len(self.routers)} routers, {kinds}, {order}")
        for engine in self.engines:
            loop.after(self._rng.uniform(0.0, 2.0), engine.begin)
        for router in self.routers:
            loop.after(self._rng.uniform(0.0, 2.0), router.start)
            self._ask_soon(router)
        for engine in self.engines:
            self._register(engine, self._rng.choice(self.routers))
        for fault in self.faults:
            if fault.number not in self._without:
                loop.after(fault.at_s, partial(self._begin, fault))
        self._go(CALM_S + FAULTS_S)
        self._quieten()
        self._go(2.0)
        for engine in self.engines:
            engine.first_quiet = 0 if engine.life is None else engine.life.next_seq
        # Requests of clients that were under way have their answers by now.
        self._go(CALM_S)
        self._end_all()
        waited_s = 0.0
        while problem := self.laws.unfinished():
            if waited_s >= QUIET_S:
                raise Broken(f"{problem}, {QUIET_S:.0f} s after the last fault")
            self._go(1.0)
            waited_s += 1.0
        self.note("world", f"whole again after {waited_s:.0f} s")
        for router in self.routers:
            self.laws.judge(router, whole=True)

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

    def _after_step(self) -> None:
        self.laws.after_step()
        if self.loop.errors:
            error = self.loop.errors[0]
            if isinstance(law := error.get("exception"), Broken):
                raise law
            raise Broken(f"error: {error.get('message')}: {error.get('exception')!r}")

    # -- clients

    def _register(self, engine: Engine, router: Router) -> None:
        """Register a worker through a router, again until it worked."""
        core, process = router.core, router.process
        if core is None or process is None:
            self.loop.after(REGISTER_RETRY_S, lambda: self._register(engine, self._clients.choice(self.routers)))
            return

        async def register() -> None:
            try:
                await core.register(engine.registration)
            except (StoreError, RouterError) as error:
                self.note(router.name, f"registers no {engine.name}: {error}")

        def check() -> None:
            if not any(
                other.core is not None and engine.worker in other.core.registry.followers for other in self.routers
            ):
                self._register(engine, self._clients.choice(self.routers))
            else:
                self.loop.after(REGISTER_AGAIN_S, check)

        self.note(router.name, f"is to register {engine.name}")
        process.start(register())
        self.loop.after(REGISTER_AGAIN_S, check)

    def _ask_soon(self, router: Router) -> None:
        def ask() -> None:
            self._ask_soon(router)
            process = router.process
            if router.core is not None and process is not None:
                process.call_soon(self._ask, router)

        self.loop.after(self._clients.uniform(*ASK_S), ask)

    def _ask(self, router: Router) -> None:
        """Ask a router as a client does, and judge what it answers from."""
        core, placer, process, rng = router.core, router.placer, router.process, self._clients
        if core is None or placer is None or process is None:
            return
        self.laws.judge(router, whole=True)
        tokens = TOKENS[rng.randrange(PROMPTS)][: rng.randrange(8, PROMPT_TOKENS + 1)]
        question = Question(MODEL, len(tokens), token_ids=np.array(tokens, np.int64))
        self.answers += 1
        try:
            if rng.random() < 0.5 or self._is_quiet:
                hits = core.ask(question)
                self._hash.update(repr([(hit.worker, hit.tokens) for hit in hits]).encode())
                return
            placement = placer.reserve(PlacementRequest(question, max_tokens=16))
        except RouterError:
            return
        selection_id = placement.selection_id
        self.note("client", f"reserves {selection_id} at {router.name} on {placement.choice.hit.worker.worker_id}")
        # Clients may reach another router the next time.
        booking = self._bookings[selection_id] = Booking(
            selection_id, router, router.token, placement.choice.hit.worker.worker_id
        )
        booking.lives = self._lives(booking)
        self._end_later(booking, "prefill_complete", rng.uniform(0.0, 1.0))
        self._end_later(booking, "release", rng.uniform(1.0, 3.0))

    def _end_later(self, booking: Booking, how: str, after_s: float) -> None:
        """Have a reservation or its prefill ended through its router or another one, again until one has answered."""
        rng = self._clients

        def end() -> None:
            router = rng.choice([booking.router, rng.choice(self.routers)])
            if not self._end(booking, how, router):
                self.loop.after(END_AGAIN_S, end)

        self.loop.after(after_s, end)

    def _end(self, booking: Booking, how: str, router: Router) -> bool:
        """Send a request that ends a reservation; return False if the router takes none."""
        placer, process = router.placer, router.process
        if placer is None or process is None:
            return False

        async def finish() -> None:
            booking.pending += 1
            try:
                await getattr(placer, how)(booking.selection_id)
            except StoreDown:
                booking.pending -= 1
                booking.is_uncertain |= how == "release"
                self._end_later(booking, how, END_AGAIN_S)
                return
            except UnknownSelection:
                booking.pending -= 1
                self._judge_unknown(booking, router)
                return
            booking.pending -= 1
            if how == "release":
                booking.releases += 1
                if booking.releases > 1:
                    self.laws.broken = f"reservations: {booking.selection_id} was released twice"
            self.note("client", f"{how} of {booking.selection_id} at {router.name}")

        process.start(finish(), CLIENT)
        return True

    def _judge_unknown(self, booking: Booking, router: Router) -> None:
        """Judge the answer that nobody has a reservation."""
        self.note("client", f"nobody has {booking.selection_id}, says {router.name}")
        owner = booking.router
        is_over = booking.releases or booking.is_uncertain or booking.pending or booking.lives != self._lives(booking)
        is_lost = owner.token != booking.token or owner.process is None
        if not is_over and not is_lost and self.loop.time() > self.disturbed_s + CALM_S:
            self.laws.broken = f"reservations: {router.name} does not find {booking.selection_id} of {owner.name}"

    def _lives(self, booking: Booking) -> tuple[int, bool]:
        engine = self._engine(booking.worker_id)
        return len(engine.spans), engine.life is None

    def _end_all(self) -> None:
        """End the reservations that were not released in the faults, each at its own router."""
        for booking in self._bookings.values():
            if not booking.releases and booking.router.token == booking.token:
                self._end(booking, "release", booking.router)

    # -- faults

    def _plan(self, rng: random.Random) -> list[Fault]:
        routers = [router.name for router in self.routers]
        engines = [engine.name for engine in self.engines]
        kinds = list(FAULTS)
        faults: list[Fault] = []
        for at_s in sorted(rng.uniform(CALM_S, CALM_S + FAULTS_S) for _ in range(rng.randrange(1, 13))):
            kind = rng.choices(kinds, [FAULTS[kind] for kind in kinds])[0]
            first = second = ""
            if kind.startswith("engine"):
                first = rng.choice(engines)
            elif kind.startswith("router"):
                first = rng.choice(routers)
            elif kind.startswith("link"):
                first, second = rng.choice(routers), rng.choice([*engines, "store", "store"])
            seconds = rng.choice((rng.uniform(0.05, 1.0), rng.uniform(0.5, 5.0), rng.uniform(2.0, 15.0)))
            faults.append(Fault(len(faults), at_s, kind, first, second, seconds, rng.random()))
        return faults

    def _begin(self, fault: Fault) -> None:
        self.note("world", str(fault))
        if not fault.kind.startswith("engine"):
            self.disturbed_s = max(self.disturbed_s, self.loop.time() + fault.seconds)
        getattr(self, f"_{fault.kind}")(fault)

    def _router(self, name: str) -> Router:
        return next(router for router in self.routers if router.name == name)

    def _engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def _later(self, fault: Fault, what: str, call: object) -> None:
        def end() -> None:
            if not self._is_quiet:
                self.note("world", f"end of fault {fault.number}: {what}")
                call()  # type: ignore[operator]

        self.loop.after(fault.seconds, end)

    def _engine_restart(self, fault: Fault) -> None:
        engine = self._engine(fault.first)
        if engine.life is not None:
            engine.die(silently=fault.draw < 0.2)
            fault_s = max(1.0, fault.seconds)
            self.loop.after(fault_s, lambda: engine.begin() if engine.life is None else None)

    def _engine_stopped(self, fault: Fault) -> None:
        engine = self._engine(fault.first)
        engine.is_stopped = True
        self._later(fault, "runs again", lambda: setattr(engine, "is_stopped", False))

    def _engine_mute(self, fault: Fault) -> None:
        engine = self._engine(fault.first)
        engine.is_mute = True
        self._later(fault, "answers again", lambda: setattr(engine, "is_mute", False))

    def _engine_slow(self, fault: Fault) -> None:
        engine = self._engine(fault.first)
        engine.slow_s = 5 * fault.draw
        self._later(fault, "is fast again", lambda: setattr(engine, "slow_s", 0.0))

    def _engine_flood(self, fault: Fault) -> None:
        for _ in range(60):
            self._engine(fault.first).publish()

    def _router_kill(self, fault: Fault) -> None:
        router = self._router(fault.first)
        router.kill(silently=fault.draw < 0.3)
        self._later(fault, "starts again", router.start)

    def _router_stop(self, fault: Fault) -> None:
        router = self._router(fault.first)
        router.stop()

        def start() -> None:
            if router.process is not None and router.core is None:
                # A process that does not end in time is killed.
                router.kill()
            router.start()

        self._later(fault, "starts again", start)

    def _router_pause(self, fault: Fault) -> None:
        router = self._router(fault.first)
        router.pause()
        self._later(fault, "goes on", router.resume)

    def _power(self, fault: Fault) -> None:
        """Kill all routers and the store at once."""
        for router in self.routers:
            router.kill(silently=True)
        self.store.crash(_lost_writes(fault), silently=True)
        self._later(fault, "the store is back", lambda: self._restore(fault))
        for router in self.routers:
            self.loop.after(self._clients.uniform(0.0, fault.seconds + 2.0), router.start)

    def _restore(self, fault: Fault) -> None:
        self.store.restart(with_data=fault.draw < 0.7, loading_s=fault.draw if fault.draw < 0.3 else 0.0)

    def _store_crash(self, fault: Fault) -> None:
        if self.store.is_up:
            self.store.crash(_lost_writes(fault), silently=fault.draw < 0.2)
            self._later(fault, "the store is back", lambda: self._restore(fault))

    def _store_failover(self, fault: Fault) -> None:
        former = list(Former)[int(fault.draw * len(Former))]
        self.note("store", f"the former primary is {former.value}")
        self.store.failover(_lost_writes(fault), former)
        self._later(fault, "the former primary ends", lambda: self.store.run(self.store.store.end_former))

    def _store_flush(self, fault: Fault) -> None:
        if self.store.is_up:
            self.store.run(self.store.store.flushall)

    def _store_evicts(self, fault: Fault) -> None:
        if self.store.is_up:
            gone = self.store.run(self.store.store.evict, 1 + int(3 * fault.draw))
            self.note("store", f"evicts {b' '.join(gone).decode()}")

    def _store_stopped(self, fault: Fault) -> None:
        self.store.run(self.store.store.stop)
        self._later(fault, "the store goes on", lambda: self.store.run(self.store.store.resume))

    def _store_full(self, fault: Fault) -> None:
        store = self.store.store
        fill, free = (store.fill, store.drain) if fault.draw < 0.5 else (store.fill_disk, store.free_disk)
        self.store.run(fill)
        self._later(fault, "the store takes writes", lambda: self.store.run(free))

    def _link_cut(self, fault: Fault) -> None:
        first, second = self.network.hosts[fault.first], self.network.hosts[fault.second]
        how = Cut.SILENT if fault.draw < 0.7 else Cut.RESET
        self.network.cut(first, second, how)
        if fault.second in {engine.name for engine in self.engines}:
            deaf_s = min(fault.seconds, DEAF_S)
            before_s = self.laws.deaf_until_s.get(fault.second, 0.0)
            self.laws.deaf_until_s[fault.second] = max(before_s, self.loop.time() + deaf_s)
        self._later(fault, "is whole", lambda: self.network.heal(first, second))

    def _link_reset(self, fault: Fault) -> None:
        self.network.drop_connections(self.network.hosts[fault.first], self.network.hosts[fault.second])

    def _network_slow(self, fault: Fault) -> None:
        self.network.slowness = 1 + 50 * fault.draw
        self._later(fault, "the network is fast", lambda: setattr(self.network, "slowness", 1.0))

    def _quieten(self) -> None:
        """End all faults."""
        self._is_quiet = True
        self.note("world", "-- quiet")
        network = self.network
        network.slowness = 1.0
        for first in network.hosts.values():
            for second in network.hosts.values():
                network.heal(first, second)
        store = self.store.store
        for end in (store.drain, store.free_disk, store.resume, store.end_former):
            self.store.run(end)
        self.store.restart(with_data=True)
        for engine in self.engines:
            engine.quieten()
        for router in self.routers:
            router.resume()
            if router.process is not None and router.core is None and router.started_s < self.loop.time() - 10.0:
                router.kill()
            router.start()


# The faults and how often each is drawn.
FAULTS = {
    "engine_restart": 4,
    "engine_stopped": 1,
    "engine_mute": 2,
    "engine_slow": 2,
    "engine_flood": 2,
    "router_kill": 4,
    "router_stop": 2,
    "router_pause": 3,
    "power": 1,
    "store_crash": 2,
    "store_failover": 2,
    "store_flush": 1,
    "store_evicts": 1,
    "store_stopped": 2,
    "store_full": 1,
    "link_cut": 4,
    "link_reset": 2,
    "network_slow": 1,
}


def _lost_writes(fault: Fault) -> int:
    """Return how many writes a crash loses: those of up to a second or two."""
    return int(MOST_LOST_WRITES * fault.draw**2)


def run_world(seed: int, without: Collection[int] = ()) -> Outcome:
    """Run one world in this process."""
    return World(seed, without).run()
