# SPDX-License-Identifier: Apache-2.0
"""Random calls to the CPU tier against dicts and lists kept by hand, with LRU and with ARC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.arc import ArcPolicy
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier, Usage, WrongState
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy
from kvrouter.engine_patch.offload.tiers.policy import Policy
from tests.support.examples import examples

# Few, so that they come again, and more than there are slots, so that some must go.
NUM_KEYS = 14
MAX_SLOTS = 8


def key(number: int) -> OffloadKey:
    return pack(number.to_bytes(8, "big"), number % 3)


def chosen(among: Iterable[int], picks: list[int]) -> list[int]:
    """What the picks mean among the numbers of the moment; one may come twice."""
    sorted_numbers = sorted(among)
    return [sorted_numbers[pick % len(sorted_numbers)] for pick in picks] if sorted_numbers else []


def unique(chosen_numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(chosen_numbers))


@dataclass
class Books:
    """What the tier should say. order: of eviction, oldest first, without those that were met while in use (aside)."""

    num_slots: int
    slots: dict[int, int] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    pins: Counter[int] = field(default_factory=Counter)
    withheld: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)
    aside: set[int] = field(default_factory=set)

    def state(self, number: int) -> ChunkState:
        if number not in self.slots:
            return ChunkState.ABSENT
        return ChunkState.WRITING if number in self.writing else ChunkState.READY

    def free(self) -> set[int]:
        return set(range(self.num_slots)) - set(self.slots.values()) - set(self.withheld)

    def may_go(self, number: int) -> bool:
        return self.state(number) is ChunkState.READY and not self.pins[number]

    def oldest(self, count: int, protected: list[int]) -> list[int]:
        """Takes out of the order the victims, and what was passed over on the way."""
        found: list[int] = []
        only_protected: list[int] = []
        for number in list(self.order):
            if len(found) == count:
                break
            self.order.remove(number)
            if number in protected and self.may_go(number):
                only_protected.append(number)
            elif self.may_go(number):
                found.append(number)
            else:
                self.aside.add(number)
        self.order += only_protected
        return found

    def returns(self, number: int) -> None:
        if number in self.aside:
            self.aside.remove(number)
            self.order.append(number)

    def forget(self, number: int) -> None:
        del self.slots[number]
        self.aside.discard(number)
        if number in self.order:
            self.order.remove(number)


class Run:
    """A tier and its model. exact: the victims must be the oldest; else they need only be allowed."""

    def __init__(self, num_slots: int, policy: Policy, exact: bool) -> None:
        self.subject = CpuTier(num_slots, policy)
        self.model = Books(num_slots)
        self.exact = exact

    def allocate(self, picks: list[int]) -> None:
        model = self.model
        wanted = unique(chosen(set(range(NUM_KEYS)) - set(model.slots), picks[:3]))
        protected = picks[3:]
        missing = len(wanted) - len(model.free())
        allowed = {n for n in model.slots if model.may_go(n) and n not in protected}
        found = self.subject.allocate([key(n) for n in wanted], frozenset(map(key, protected)))
        if missing > len(allowed):
            assert found is None
            return
        assert found is not None
        evicted = [int.from_bytes(one[:8], "big") for one in found.evicted]
        assert [key(n) for n in evicted] == found.evicted
        assert len(set(evicted)) == len(evicted) == max(0, missing)
        assert set(evicted) <= allowed
        if self.exact:
            assert evicted == model.oldest(len(evicted), protected)
        for number in evicted:
            model.forget(number)
        assert len(set(found.slots)) == len(found.slots) == len(wanted)
        assert set(found.slots) <= model.free()
        model.slots.update(zip(wanted, found.slots, strict=True))
        model.writing.update(wanted)
        model.order += reversed(wanted)

    def ready(self, picks: list[int]) -> None:
        for number in unique(chosen(self.model.writing, picks)):
            self.subject.ready(key(number))
            self.model.writing.remove(number)
            self.model.returns(number)

    def abandon(self, picks: list[int]) -> None:
        for number in chosen(self.model.writing, picks[:1]):
            self.subject.abandon(key(number))
            self.model.writing.remove(number)
            self.model.forget(number)

    def pin(self, picks: list[int]) -> None:
        wanted = chosen(set(self.model.slots) - self.model.writing, picks[:3])
        self.subject.pin([key(n) for n in wanted])
        self.model.pins.update(wanted)

    def unpin(self, picks: list[int]) -> None:
        wanted = list((Counter(chosen(self.model.pins, picks)) & self.model.pins).elements())
        self.subject.unpin([key(n) for n in wanted])
        for number in reversed(wanted):
            self.model.pins[number] -= 1
            if not self.model.pins[number]:
                self.model.returns(number)
        self.model.pins = +self.model.pins

    def touch(self, picks: list[int]) -> None:
        self.subject.touch([key(n) for n in picks])
        for number in reversed(picks):
            if self.model.state(number) is ChunkState.READY and number in self.model.order:
                self.model.order.remove(number)
                self.model.order.append(number)

    def discard(self, picks: list[int]) -> None:
        for number in picks[:1]:
            may_go = self.model.may_go(number)
            assert self.subject.discard(key(number)) == may_go
            if may_go:
                self.model.forget(number)

    def clear(self, picks: list[int]) -> None:
        """Every other time with the busy slots named: any slots at all."""
        model = self.model
        named = chosen(range(model.num_slots), picks) if len(picks) % 2 else None
        in_use = [model.slots[n] for n in [*model.writing, *model.pins.elements()]]
        busy = Counter(in_use if named is None else named)
        ready = [key(n) for n in model.slots if n not in model.writing]
        assert self.subject.clear(named) == ready
        # What was withheld before waits for no more transfers than it did.
        self.model = Books(model.num_slots, withheld=Counter(dict(busy) | dict(model.withheld)))

    def release(self, picks: list[int]) -> None:
        for slot in (Counter(chosen(self.model.withheld, picks)) & self.model.withheld).elements():
            self.subject.release(slot)
            self.model.withheld[slot] -= 1
        self.model.withheld = +self.model.withheld

    def forbidden(self, picks: list[int]) -> None:
        model, subject = self.model, self.subject
        asked = [key(n) for n in picks]
        if set(picks) & set(model.slots) or len(set(picks)) < len(picks):
            refused(lambda: subject.allocate(asked))
        if any(model.state(n) is not ChunkState.READY for n in picks):
            refused(lambda: subject.pin(asked))
        if any(count > model.pins[n] for n, count in Counter(picks).items()):
            refused(lambda: subject.unpin(asked))
        for number in model.pins:
            one_too_many = [key(n) for n in [*model.pins.elements(), number]]
            refused(lambda keys=one_too_many: subject.unpin(keys))  # type: ignore[misc]
        for one in map(key, set(picks) - model.writing):
            refused(lambda one=one: subject.ready(one))  # type: ignore[misc]
            refused(lambda one=one: subject.abandon(one))  # type: ignore[misc]
        for slot in set(picks) - set(model.withheld):
            refused(lambda slot=slot: subject.release(slot))  # type: ignore[misc]
        if any(slot >= model.num_slots for slot in picks):
            refused(lambda: subject.clear(picks))

    def check(self) -> None:
        model, subject = self.model, self.subject
        for number in range(NUM_KEYS):
            assert subject.state(key(number)) is model.state(number)
        assert {n: subject.slot(key(n)) for n in model.slots} == model.slots
        used_by = [model.slots[n] for n in model.writing] + [model.slots[n] for n in model.pins.elements()]
        assert sorted(subject.busy_slots()) == sorted(used_by)
        assert subject.ready_keys() == [key(n) for n in model.slots if n not in model.writing]
        used = list(model.slots.values())
        assert len(set(used)) == len(used)
        assert not set(used) & set(model.withheld)
        usage = subject.usage
        assert usage == Usage(
            num_slots=model.num_slots,
            free=len(model.free()),
            writing=len(model.writing),
            ready=len(model.slots) - len(model.writing),
            pinned=len(model.pins),
            withheld=len(model.withheld),
        )
        assert usage.free + usage.writing + usage.ready + usage.withheld == usage.num_slots


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except WrongState:
        return
    raise AssertionError("this was not refused")


Step = tuple[Callable[[Run, list[int]], None], list[int]]

# As often as it takes for tiers to be full, with some chunks in use, most of the time.
CALLS: list[Callable[[Run, list[int]], None]] = [
    *[Run.allocate] * 6,
    *[Run.ready] * 4,
    *[Run.pin] * 2,
    *[Run.unpin] * 2,
    *[Run.touch] * 2,
    *[Run.release] * 2,
    Run.discard,
    Run.abandon,
    Run.forbidden,
]
picks = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=5)
lives: st.SearchStrategy[list[list[Step]]] = st.lists(
    st.lists(st.tuples(st.sampled_from(CALLS), picks), min_size=30, max_size=60), min_size=1, max_size=3
)
sizes = st.integers(1, MAX_SLOTS)


@given(sizes, lives, picks)
@settings(max_examples=examples(200))
def test_with_lru_the_tier_does_what_its_model_does(
    num_slots: int, script: list[list[Step]], at_end: list[int]
) -> None:
    run = Run(num_slots, LruPolicy(num_slots), exact=True)
    for life in script:
        for call, picked in life:
            call(run, picked)
            run.check()
        run.clear(at_end)
        run.check()


@given(sizes, lives, picks)
@settings(max_examples=examples(200))
def test_with_arc_the_tier_keeps_its_books_and_the_policy_its_bounds(
    num_slots: int, script: list[list[Step]], at_end: list[int]
) -> None:
    policy = ArcPolicy(num_slots)
    run = Run(num_slots, policy, exact=False)
    for life in script:
        for call, picked in life:
            call(run, picked)
            run.check()
            lists = policy.sizes
            assert lists.t1 + lists.t2 == len(policy) == len(run.model.slots)
            assert lists.t1 + lists.b1 <= num_slots
            assert lists.t1 + lists.t2 + lists.b1 + lists.b2 <= 2 * num_slots
            assert 0 <= lists.target <= num_slots
        run.clear(at_end)
        run.check()
