# SPDX-License-Identifier: Apache-2.0
"""The table of reservations against a list of reservations: never negative, and empty once all have ended."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import astuple

from kvrouter.router.base.common.errors import Conflict
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.load.load_table import NOTHING, LoadTable, Totals
from tests.support.examples import examples

WORKERS = [WorkerKey("m", name) for name in "abc"]
TTL_S, PREFILL_TTL_S, MOST = 100.0, 20.0, 6

workers = st.sampled_from(WORKERS)
tokens = st.integers(0, 1_000)
ids = st.sampled_from([f"s{number}" for number in range(8)])
processes = st.sampled_from(["p", "q"])
totals = st.builds(Totals, tokens, tokens, st.integers(0, 3), tokens)


class Held:
    """The model's copy of one reservation."""

    def __init__(
        self, worker: WorkerKey, prefill: int, decode: int, made_s: float, source: WorkerKey | None, lent: int
    ) -> None:
        self.worker, self.prefill, self.decode, self.made_s = worker, prefill, decode, made_s
        self.counts = True
        # The worker that lends to it, and how many tokens until its prefill is over.
        self.source, self.lent = source, lent


class Machine(RuleBasedStateMachine):
    """A table of reservations of this process and of two others, and its model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LoadTable(ttl_s=TTL_S, prefill_ttl_s=PREFILL_TTL_S, max_reservations=MOST)
        self.now = 0.0
        self.held: dict[str, Held] = {}
        self.others: dict[str, tuple[float, dict[WorkerKey, Totals]]] = {}
        # The totals that another process would have from this one's messages.
        self.told: dict[WorkerKey, Totals] = {}

    @rule(seconds=st.floats(0, 30))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=ids, worker=workers, prefill=tokens, decode=tokens, source=st.none() | workers, lent=tokens)
    def reserve(
        self, name: str, worker: WorkerKey, prefill: int, decode: int, source: WorkerKey | None, lent: int
    ) -> None:
        lent = lent if source is not None else 0
        if name in self.held:
            try:
                self.table.reserve(name, worker, prefill, decode, self.now, source=source, lent_tokens=lent)
            except Conflict:
                return
            raise AssertionError("one id, two reservations")
        dropped = self.table.reserve(name, worker, prefill, decode, self.now, source=source, lent_tokens=lent)
        assert dropped == list(self.held)[: max(0, len(self.held) - MOST + 1)]
        for gone in dropped:
            del self.held[gone]
        self.held[name] = Held(worker, prefill, decode, self.now, source, lent)

    @rule(name=ids)
    def prefill_done(self, name: str) -> None:
        assert self.table.prefill_done(name, self.now) == (name in self.held)
        if name in self.held:
            self.held[name].prefill = self.held[name].lent = 0

    @rule(name=ids, prefill=st.none() | tokens)
    def renew(self, name: str, prefill: int | None) -> None:
        self.table.renew(name, self.now, prefill_tokens=prefill)
        if name in self.held:
            held = self.held[name] = self.held.pop(name)
            held.made_s, held.counts, held.lent = self.now, True, 0
            held.prefill = held.prefill if prefill is None else prefill

    @rule(name=ids)
    def release(self, name: str) -> None:
        assert self.table.release(name, self.now) == (self.held.pop(name, None) is not None)
        assert name not in self.table

    @rule(worker=workers, age=st.floats(0, 50))
    def void(self, worker: WorkerKey, age: float) -> None:
        ended = self.table.void(worker, self.now - age, self.now)
        mine = [h for h in self.held.values() if h.worker == worker and h.made_s < self.now - age and h.counts]
        assert ended == len(mine)
        for held in mine:
            held.counts, held.lent = False, 0

    @rule()
    def expire(self) -> None:
        old = [name for name, held in self.held.items() if held.made_s <= self.now - TTL_S]
        assert self.table.expire(self.now) == old
        for name in old:
            del self.held[name]
        for held in self.held.values():
            # A voided prefill is over already, so it does not expire, and a renewal brings it back.
            if held.counts and held.made_s <= self.now - PREFILL_TTL_S:
                held.prefill = held.lent = 0

    @rule(process=processes, said=st.dictionaries(workers, totals, max_size=3), whole=st.booleans())
    def heard(self, process: str, said: dict[WorkerKey, Totals], whole: bool) -> None:
        self.table.heard(process, said, whole=whole, now=self.now)
        before = {} if whole else dict(self.others.get(process, (0.0, {}))[1])
        self.others[process] = (self.now, before | said)

    @rule(age=st.floats(0, 10))
    def forget_silent(self, age: float) -> None:
        gone = {process for process, (heard_s, _) in self.others.items() if heard_s < self.now - age}
        assert set(self.table.forget_silent(self.now - age, self.now)) == gone
        for process in gone:
            del self.others[process]

    @rule(whole=st.booleans())
    def tell(self, whole: bool) -> None:
        if whole:
            self.told = dict(self.table.own())
        else:
            self.told |= self.table.own_changes()
        assert not self.table.own_changes()
        assert all(self.told.get(worker, NOTHING) == self.own(worker) for worker in WORKERS)

    def own(self, worker: WorkerKey) -> Totals:
        mine = [held for held in self.held.values() if held.worker == worker and held.counts]
        lent = sum(held.lent for held in self.held.values() if held.source == worker)
        return Totals(sum(h.prefill for h in mine), sum(h.decode for h in mine), len(mine), lent)

    @invariant()
    def loads_are_the_sum_of_all(self) -> None:
        for worker in WORKERS:
            parts = [self.own(worker), *(totals_heard.get(worker, NOTHING) for _, totals_heard in self.others.values())]
            load = self.table.loads.get(worker)
            loaded = (
                NOTHING
                if load is None
                else Totals(load.prefill_tokens, load.decode_tokens, load.requests, load.lent_tokens)
            )
            assert loaded == Totals(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))
            assert min(astuple(loaded)) >= 0
            # A worker without load has no entry.
            assert (load is None) == (loaded == NOTHING)
        assert len(self.table) == len(self.held)
        assert self.table.others == len(self.others)

    @invariant()
    def the_prompt_under_way_is_the_oldest_of_ours_and_began_when_something_changed(self) -> None:
        for worker, load in self.table.loads.items():
            waiting = [
                held.prefill for held in self.held.values() if held.worker == worker and held.counts and held.prefill
            ]
            assert load.head_tokens == (waiting[0] if waiting else 0)
            assert load.head_tokens <= load.prefill_tokens and load.since_s <= self.now

    @precondition(lambda self: self.now > 0)
    @rule()
    def all_ends(self) -> None:
        for name in list(self.held):
            self.release(name)
        for process in list(self.others):
            self.table.forget_process(process, self.now)
            del self.others[process]
        assert not self.table.loads and not self.table.own()
        self.told = {}


TestTable = Machine.TestCase
TestTable.settings = settings(max_examples=examples(80), stateful_step_count=40)
