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

# Few keys, so that they repeat, but more than there are slots, so that some are evicted.
NUM_KEYS = 14
MAX_SLOTS = 8


def key(number: int) -> OffloadKey:
    return pack(number.to_bytes(8, "big"), number % 3)


def chosen(among: Iterable[int], picks: list[int]) -> list[int]:
    """Map picks to the given numbers; one number may appear twice."""
    sorted_numbers = sorted(among)
    return [sorted_numbers[pick % len(sorted_numbers)] for pick in picks] if sorted_numbers else []


def unique(chosen_numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(chosen_numbers))


@dataclass
class Books:
    """The model of the tier: the state that the tier should report."""

    num_slots: int
    slots: dict[int, int] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    pins: Counter[int] = field(default_factory=Counter)
    withheld: Counter[int] = field(default_factory=Counter)
    # The order of eviction, oldest first, without the chunks in `aside`.
    order: list[int] = field(default_factory=list)
    # Chunks that an eviction passed over because they were in use.
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
        """Remove the victims from the order, and the busy chunks passed over on the way. Return the victims."""
        victims: list[int] = []
        only_protected: list[int] = []
        for number in list(self.order):
            if len(victims) == count:
                break
            self.order.remove(number)
            if number in protected and self.may_go(number):
                only_protected.append(number)
            elif self.may_go(number):
                victims.append(number)
            else:
                self.aside.add(number)
        self.order += only_protected
        return victims

    def returns(self, number: int) -> None:
        """Put a chunk that is no longer in use at the end of the order, if an eviction had passed it over."""
        if number in self.aside:
            self.aside.remove(number)
            self.order.append(number)

    def forget(self, number: int) -> None:
        del self.slots[number]
        self.aside.discard(number)
        if number in self.order:
            self.order.remove(number)


class Run:
    """A tier and its model.

    If `exact`, the victims must be the oldest chunks; otherwise they need only be chunks that may be evicted.
    """

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
        allocation = self.subject.allocate([key(n) for n in wanted], frozenset(map(key, protected)))
        if missing > len(allowed):
            assert allocation is None
            return
        assert allocation is not None
        evicted = [int.from_bytes(offload_key[:8], "big") for offload_key in allocation.evicted]
        assert [key(n) for n in evicted] == allocation.evicted
        assert len(set(evicted)) == len(evicted) == max(0, missing)
        assert set(evicted) <= allowed
        if self.exact:
            assert evicted == model.oldest(len(evicted), protected)
        for number in evicted:
            model.forget(number)
        assert len(set(allocation.slots)) == len(allocation.slots) == len(wanted)
        assert set(allocation.slots) <= model.free()
        model.slots.update(zip(wanted, allocation.slots, strict=True))
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
        """Clear the tier; every other time with any slots named as busy."""
        model = self.model
        named = chosen(range(model.num_slots), picks) if len(picks) % 2 else None
        in_use = [model.slots[n] for n in [*model.writing, *model.pins.elements()]]
        busy = Counter(in_use if named is None else named)
        ready = [key(n) for n in model.slots if n not in model.writing]
        assert self.subject.clear(named) == ready
        # Slots that were withheld before wait for no more transfers than before.
        self.model = Books(model.num_slots, withheld=Counter(dict(busy) | dict(model.withheld)))

    def release(self, picks: list[int]) -> None:
        for slot in (Counter(chosen(self.model.withheld, picks)) & self.model.withheld).elements():
            self.subject.release(slot)
            self.model.withheld[slot] -= 1
        self.model.withheld = +self.model.withheld

    def forbidden(self, picks: list[int]) -> None:
        """Make every call that the state forbids, and see it refused."""
        model, subject = self.model, self.subject
        picked_keys = [key(n) for n in picks]
        if set(picks) & set(model.slots) or len(set(picks)) < len(picks):
            refused(lambda: subject.allocate(picked_keys))
        if any(model.state(n) is not ChunkState.READY for n in picks):
            refused(lambda: subject.pin(picked_keys))
        if any(count > model.pins[n] for n, count in Counter(picks).items()):
            refused(lambda: subject.unpin(picked_keys))
        for number in model.pins:
            one_too_many = [key(n) for n in [*model.pins.elements(), number]]
            refused(lambda keys=one_too_many: subject.unpin(keys))  # type: ignore[misc]
        for absent_key in map(key, set(picks) - model.writing):
            refused(lambda absent_key=absent_key: subject.ready(absent_key))  # type: ignore[misc]
            refused(lambda absent_key=absent_key: subject.abandon(absent_key))  # type: ignore[misc]
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

# The calls, repeated so that tiers are full most of the time, with some chunks in use.
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
