# SPDX-License-Identifier: Apache-2.0
"""Random histories of several routers and sources on one registry.

No source takes a worker that another source owns, and all routers converge to the union of the sources.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.discovery.reconcile import Name, name_of, plan
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import FILE, KUBERNETES, PRECEDENCE, REGISTER, STATIC, wins
from tests.support.examples import examples

NAMES: tuple[Name, ...] = tuple((worker_id, rank) for worker_id in ("a", "b", "c") for rank in (0, 1))
SOURCES = (STATIC, FILE, KUBERNETES)
ROUTERS = ("r0", "r1")

names = st.sampled_from(NAMES)
sources = st.sampled_from(SOURCES)
routers = st.sampled_from(ROUTERS)


def registration(name: Name, source: str, url: str = "http://h:1", model: str = "m") -> Registration:
    return Registration(WorkerKey(model, *name), url=url, source=source)


class Router:
    """The knowledge of one process; a source that is down keeps its last entry in `shown`."""

    def __init__(self) -> None:
        self.shown: dict[str, dict[Name, Registration]] = {source: {} for source in SOURCES}
        self.down: set[str] = set()
        self.asserted: dict[str, dict[Name, Registration]] = {source: {} for source in SOURCES}

    def claims(self, source: str) -> set[Name]:
        return set() if source in self.down else set(self.shown[source])


class Machine(RuleBasedStateMachine):
    """The registry as the fleet keeps it, and the routers that reconcile it with their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = {name: Router() for name in ROUTERS}
        self.registered: dict[Name, Registration] = {}

    @rule(router=routers, source=sources, name=names, url=st.sampled_from(("http://h:1", "http://h:2")))
    def appears(self, router: str, source: str, name: Name, url: str) -> None:
        if source not in self.routers[router].down:
            self.routers[router].shown[source][name] = registration(name, source, url)

    @rule(router=routers, source=sources, name=names)
    def vanishes(self, router: str, source: str, name: Name) -> None:
        if source not in self.routers[router].down:
            self.routers[router].shown[source].pop(name, None)

    @rule(router=routers, source=sources)
    def fails(self, router: str, source: str) -> None:
        self.routers[router].down.add(source)

    @rule(router=routers, source=sources)
    def heals(self, router: str, source: str) -> None:
        self.routers[router].down.discard(source)

    @rule(router=routers)
    def restarts(self, router: str) -> None:
        state = self.routers[router]
        state.asserted = {source: {} for source in SOURCES}

    @rule(name=names)
    def a_client_registers(self, name: Name) -> None:
        self.write(registration(name, REGISTER))

    @rule(name=names)
    def a_client_unregisters(self, name: Name) -> None:
        if name in self.registered and self.registered[name].source == REGISTER:
            del self.registered[name]

    @rule(router=routers)
    def looks(self, router: str) -> None:
        self.look(router)

    def write(self, new: Registration) -> bool:
        """Register a worker unless a source with precedence has registered it, as `Fleet.register` does."""
        registered = self.registered.get(name_of(new))
        if registered is not None and wins(registered.source, new.source):
            return False
        self.registered[name_of(new)] = new
        return True

    def look(self, router: str) -> None:
        state = self.routers[router]
        for source in SOURCES:
            if source in state.down:
                continue
            others = set().union(*(o.claims(source) for name, o in self.routers.items() if name != router))
            before = dict(self.registered)
            changes = plan(
                source,
                state.shown[source].values(),
                (),
                self.registered.values(),
                asserted=state.asserted[source],
                claimed=others,
            )
            for worker in changes.withdraw:
                name = worker[1:]
                assert before[name].source == source, "it took what another owns"
                assert not any(name in o.claims(source) for o in self.routers.values()), "it took what somebody sees"
                del self.registered[name]
            for new in changes.register:
                assert self.write(new), "it wrote over what wins"
                state.asserted[source][name_of(new)] = new
            state.asserted[source] |= {name_of(agreed): agreed for agreed in changes.agreed}

    @invariant()
    def looking_again_and_again_comes_to_rest_at_the_union(self) -> None:
        """Let all routers look until nothing changes, and compare the registry with the union of their sources."""
        kept = self.registered, {name: msgspec.structs.replace(entry) for name, entry in self.registered.items()}
        asserted = {name: {s: dict(a) for s, a in r.asserted.items()} for name, r in self.routers.items()}
        for _ in range(4):
            for router in ROUTERS:
                self.look(router)
        rest = dict(self.registered)
        for router in ROUTERS:
            self.look(router)
        assert self.registered == rest, "it swings"
        for name in NAMES:
            seen = {source for source in SOURCES for router in self.routers.values() if name in router.claims(source)}
            result = self.registered.get(name)
            if seen:
                assert result is not None
                # A source that is down everywhere keeps its registrations, and its precedence still counts.
                best = min(seen, key=PRECEDENCE.index)
                assert result.source == best or wins(result.source, best)
        for source in SOURCES:
            if any(source not in router.down for router in self.routers.values()):
                left = {name for name, entry in self.registered.items() if entry.source == source}
                assert left <= set().union(*(router.claims(source) for router in self.routers.values()))
        # The next rule begins from the state before this check.
        self.registered = kept[1]
        for router, state in self.routers.items():
            state.asserted = asserted[router]


Machine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=25)
TestReconciling = Machine.TestCase


def one(source: str, url: str = "http://h:1", **changes: object) -> Registration:
    return msgspec.structs.replace(registration(("a", 0), source, url), **changes)


def test_what_a_client_registered_stays_while_it_is_the_same_engine() -> None:
    registered = one(FILE, draining=True)
    same = plan(FILE, [one(FILE)], (), [registered], asserted={}, claimed=())
    assert not same.register and not same.withdraw
    (moved,) = plan(FILE, [one(FILE, "http://h:2")], (), [registered], asserted={}, claimed=()).register
    assert not moved.draining


def test_a_pod_that_takes_no_request_is_of_interest_only_if_it_is_known() -> None:
    leaving = one(KUBERNETES, retiring=True)
    assert not plan(KUBERNETES, [leaving], [("a", 0)], [], asserted={}, claimed=()).register
    others = plan(KUBERNETES, [leaving], [("a", 0)], [one(REGISTER)], asserted={}, claimed=())
    assert not others.register, "it must not take over what a client registered"
    assert plan(KUBERNETES, [leaving], [("a", 0)], [one(KUBERNETES)], asserted={}, claimed=()).register == [leaving]


def test_two_routers_with_different_registrations_do_not_write_in_turns() -> None:
    mine, theirs = one(FILE, "http://h:1"), one(FILE, "http://h:2")
    first = plan(FILE, [mine], (), [theirs], asserted={}, claimed=[("a", 0)])
    assert first.register == [mine], "who says something new is heard"
    again = plan(FILE, [mine], (), [theirs], asserted={("a", 0): mine}, claimed=[("a", 0)])
    assert not again.register and "another router" in again.contested["a", 0]
    reworded = msgspec.structs.replace(mine, note="its engine did not answer")
    noted = plan(FILE, [mine], (), [reworded], asserted={("a", 0): mine}, claimed=[("a", 0)])
    assert not noted.register and not noted.contested, "why an engine does not answer may differ from router to router"
    assert plan(FILE, [mine], (), [mine], asserted={}, claimed=()).agreed == [mine]
    alone = plan(FILE, [mine], (), [theirs], asserted={("a", 0): mine}, claimed=())
    assert alone.register == [mine]


def test_a_source_that_wins_takes_over_and_gives_back() -> None:
    assert plan(STATIC, [one(STATIC)], (), [one(FILE)], asserted={}, claimed=()).register == [one(STATIC)]
    contested = plan(FILE, [one(FILE)], (), [one(STATIC)], asserted={}, claimed=())
    assert not contested.register and contested.contested == {
        ("a", 0): "static registers it, too, and takes precedence"
    }
    assert plan(STATIC, [], (), [one(STATIC)], asserted={}, claimed=()).withdraw == [WorkerKey("m", "a", 0)]
    assert plan(FILE, [one(FILE)], (), [], asserted={}, claimed=()).register == [one(FILE)]
