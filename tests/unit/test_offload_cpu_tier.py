# SPDX-License-Identifier: Apache-2.0
"""What the CPU tier's books say after each call, and which calls they forbid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.cpu_tier import Allocation, ChunkState, CpuTier, Usage, WrongState
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy
from kvrouter.engine_patch.offload.tiers.policy import PolicyError, make_policy

ABSENT, WRITING, READY = ChunkState.ABSENT, ChunkState.WRITING, ChunkState.READY


def keys(*numbers: int) -> list[OffloadKey]:
    return [pack(number.to_bytes(8, "big"), 1) for number in numbers]


def key(number: int) -> OffloadKey:
    return keys(number)[0]


def tier(num_slots: int, *ready: int, policy: str = "lru") -> CpuTier:
    """A tier that holds these chunks, the first the oldest."""
    made = CpuTier(num_slots, make_policy(policy, num_slots))
    for number in ready:
        store(made, number)
    return made


def store(made: CpuTier, *numbers: int, protected: frozenset[OffloadKey] = frozenset()) -> Allocation | None:
    allocation = made.allocate(keys(*numbers), protected)
    if allocation is not None:
        for number in numbers:
            made.ready(key(number))
    return allocation


def books(made: CpuTier) -> tuple[object, ...]:
    slots = {one: made.slot(one) for one in made.ready_keys()}
    return made.usage, slots, sorted(made.busy_slots())


def oldest_first(made: CpuTier) -> list[OffloadKey]:
    """Evicts everything."""
    ready = len(made.ready_keys())
    allocation = made.allocate(keys(*range(900, 900 + made.num_slots)))
    assert allocation is not None
    assert len(allocation.evicted) == ready
    return allocation.evicted


def test_a_chunk_is_absent_then_writing_then_ready() -> None:
    made = tier(4)
    assert made.state(key(1)) is ABSENT
    allocation = made.allocate(keys(1, 2))
    assert allocation == Allocation([0, 1], [])
    assert [made.state(one) for one in keys(1, 2, 3)] == [WRITING, WRITING, ABSENT]
    assert [made.slot(one) for one in keys(1, 2)] == [0, 1]
    made.ready(key(2))
    assert [made.state(one) for one in keys(1, 2)] == [WRITING, READY]
    assert made.ready_keys() == keys(2)
    assert made.usage == Usage(num_slots=4, free=2, writing=1, ready=1, pinned=0, withheld=0)


def test_an_abandoned_slot_is_free_at_once() -> None:
    made = tier(2)
    made.allocate(keys(1, 2))
    made.abandon(key(1))
    assert made.state(key(1)) is ABSENT
    assert made.allocate(keys(3)) == Allocation([0], [])


def test_the_oldest_makes_room_and_its_slot_is_used_again() -> None:
    made = tier(3, 1, 2, 3)
    made.touch(keys(1))
    assert made.allocate(keys(4, 5)) == Allocation([2, 1], keys(2, 3))
    assert [made.state(one) for one in keys(1, 2, 3, 4, 5)] == [READY, ABSENT, ABSENT, WRITING, WRITING]
    assert made.evicted_total == 2


def test_free_slots_are_used_before_anything_is_evicted() -> None:
    made = tier(3, 1)
    assert store(made, 2, 3) == Allocation([1, 2], [])
    allocation = store(made, 4, 5)
    assert allocation is not None
    assert len(allocation.evicted) == 2


def test_all_or_nothing() -> None:
    made = tier(4, 1, 2)
    made.allocate(keys(3))
    before = books(made)
    assert made.allocate(keys(4, 5, 6, 7)) is None
    assert made.allocate(keys(*range(10, 20))) is None
    assert books(made) == before
    assert [made.state(one) for one in keys(1, 2, 3, 4)] == [READY, READY, WRITING, ABSENT]
    assert (made.refused_total, made.evicted_total) == (2, 0)
    allocation = made.allocate(keys(4, 5, 6))
    assert allocation is not None
    assert allocation.evicted == keys(1, 2)


def test_no_keys_need_no_room() -> None:
    made = tier(1, 1)
    made.pin(keys(1))
    assert made.allocate([]) == Allocation([], [])


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_is_in_use_stays(policy: str) -> None:
    made = tier(5, 1, 2, 3, 4, policy=policy)
    made.pin(keys(1))
    made.allocate(keys(5))
    allocation = made.allocate(keys(6), frozenset(keys(2)))
    assert allocation is not None
    assert allocation.evicted == keys(3)
    # 4 alone could go.
    before = books(made)
    assert made.allocate(keys(7, 8), frozenset(keys(2))) is None
    assert books(made) == before


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_was_in_use_can_go_afterwards(policy: str) -> None:
    made = tier(5, 1, 2, 3, 4, policy=policy)
    made.pin(keys(1))
    made.allocate(keys(5))
    # Passes over the pinned one and the protected one.
    made.allocate(keys(6), frozenset(keys(2)))
    made.unpin(keys(1))
    made.ready(key(5))
    made.ready(key(6))
    assert sorted(oldest_first(made)) == keys(1, 2, 4, 5, 6)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_chunk_that_was_met_while_it_was_written_can_go_when_it_is_ready(policy: str) -> None:
    made = tier(2, policy=policy)
    made.allocate(keys(1))
    store(made, 2)
    assert made.allocate(keys(3)) == Allocation([1], keys(2))
    made.ready(key(3))
    made.ready(key(1))
    assert oldest_first(made) == keys(3, 1)


def test_the_tail_of_what_was_pinned_goes_before_its_head() -> None:
    made = tier(3, 1, 2, 3)
    made.pin(keys(1, 2))
    store(made, 4)
    made.unpin(keys(1, 2))
    assert oldest_first(made) == keys(4, 2, 1)


def test_a_protected_key_that_is_also_pinned_waits_for_its_pin() -> None:
    made = tier(3, 1, 2, 3)
    made.pin(keys(1))
    made.allocate(keys(4), frozenset(keys(1)))
    made.ready(key(4))
    assert made.allocate(keys(5, 6, 7)) is None
    made.unpin(keys(1))
    assert oldest_first(made) == keys(3, 4, 1)


def test_protected_keys_need_not_be_there() -> None:
    made = tier(2, 1, 2)
    assert made.allocate(keys(3, 4), frozenset(keys(3, 4, 5, 6, 7))) == Allocation([1, 0], keys(1, 2))


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    made = tier(6)
    store(made, 1, 2, 3)
    store(made, 4, 5, 6)
    assert oldest_first(made) == keys(3, 2, 1, 6, 5, 4)
    made = tier(3, 1, 2, 3)
    made.touch(keys(1, 2))
    assert oldest_first(made) == keys(3, 2, 1)


def test_pins_are_counted() -> None:
    made = tier(2, 1, 2)
    made.pin(keys(1, 1, 2))
    made.pin(keys(1))
    assert made.usage.pinned == 2
    made.unpin(keys(1, 2))
    assert made.busy_slots() == [made.slot(key(1))] * 2
    assert made.allocate(keys(3, 4)) is None
    made.unpin(keys(1, 1))
    assert made.allocate(keys(3, 4)) is not None


def test_touch_passes_over_what_is_not_ready() -> None:
    made = CpuTier(3, policy := make_policy("arc", 3))
    made.allocate(keys(1, 2))
    made.touch(keys(1, 2, 3))
    made.ready(key(1))
    made.ready(key(2))
    store(made, 3)
    # Were 1 in T2, then 2 and 3 would go first.
    assert len(policy) == 3
    assert oldest_first(made) == keys(2, 1, 3)


def test_discard_takes_only_what_is_ready_and_not_pinned() -> None:
    made = tier(3, 1, 2)
    made.allocate(keys(3))
    made.pin(keys(2))
    assert [made.discard(one) for one in keys(1, 2, 3, 4, 1)] == [True, False, False, False, False]
    assert made.usage == Usage(num_slots=3, free=1, writing=1, ready=1, pinned=1, withheld=0)
    assert made.allocate(keys(5)) == Allocation([0], [])


def test_clear_withholds_the_slots_of_transfers_under_way() -> None:
    made = tier(4, 1, 2, 3)
    made.allocate(keys(4))
    made.pin(keys(2, 2))
    assert sorted(made.busy_slots()) == [1, 1, 3]
    assert made.clear() == keys(1, 2, 3)
    assert made.usage == Usage(num_slots=4, free=2, writing=0, ready=0, pinned=0, withheld=2)
    assert [made.state(one) for one in keys(1, 2, 3, 4)] == [ABSENT] * 4
    assert made.allocate(keys(1, 2)) == Allocation([0, 2], [])
    assert made.allocate(keys(3)) is None
    made.release(1)
    assert made.allocate(keys(3)) is None
    made.release(1)
    assert made.allocate(keys(3)) == Allocation([1], [])
    made.release(3)
    assert made.allocate(keys(4)) == Allocation([3], [])


def test_the_caller_may_say_which_slots_are_busy() -> None:
    made = tier(3, 1, 2)
    made.allocate(keys(3))
    assert made.clear([0]) == keys(1, 2)
    assert made.allocate(keys(1, 2)) == Allocation([1, 2], [])
    assert made.usage.withheld == 1


def test_a_second_clear_keeps_what_the_first_withheld() -> None:
    made = tier(3, 1, 2)
    made.pin(keys(1))
    made.clear()
    store(made, 5)
    made.pin(keys(5))
    # Named again, but it is the same transfer.
    assert made.clear([0, 0, 1]) == keys(5)
    assert made.usage.withheld == 2
    made.release(0)
    made.release(1)
    assert made.usage == Usage(num_slots=3, free=3, writing=0, ready=0, pinned=0, withheld=0)


def test_an_emptied_tier_forgets_its_order() -> None:
    made = tier(2, 1, 2)
    made.clear()
    store(made, 2)
    store(made, 1)
    assert oldest_first(made) == keys(2, 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda made: made.allocate(keys(9, 1)), "is READY and cannot be allocated again"),
        (lambda made: made.allocate(keys(2)), "is WRITING and cannot be allocated again"),
        (lambda made: made.allocate(keys(9, 8, 9)), "a key comes twice"),
        (lambda made: made.slot(key(9)), "is ABSENT and has no slot"),
        (lambda made: made.ready(key(1)), "is READY and cannot become READY"),
        (lambda made: made.ready(key(9)), "is ABSENT and cannot become READY"),
        (lambda made: made.abandon(key(1)), "is READY and cannot be abandoned"),
        (lambda made: made.abandon(key(9)), "is ABSENT and cannot be abandoned"),
        (lambda made: made.pin(keys(1, 2)), "is WRITING and cannot be pinned"),
        (lambda made: made.pin(keys(1, 9)), "is ABSENT and cannot be pinned"),
        (lambda made: made.unpin(keys(1)), "is READY and has 0 pins, 1 of them cannot be taken back"),
        (lambda made: made.unpin(keys(3, 3)), "is READY and has 1 pins, 2 of them cannot be taken back"),
        (lambda made: made.release(0), "slot 0 is not withheld"),
        (lambda made: made.clear([4]), "slot 4 cannot be withheld: this tier has slots 0 to 3"),
        (lambda made: made.clear([0, -1]), "slot -1 cannot be withheld"),
    ],
)
def test_a_call_that_the_state_forbids_changes_nothing(call: Callable[[CpuTier], object], said: str) -> None:
    made = tier(4, 1, 3)
    made.allocate(keys(2))
    made.pin(keys(3))
    before = books(made)
    with pytest.raises(WrongState, match=said):
        call(made)
    assert books(made) == before


def test_the_message_names_the_chunk() -> None:
    with pytest.raises(WrongState, match="chunk 000000000000000900000001 is ABSENT"):
        tier(1).slot(key(9))


@pytest.mark.parametrize("num_slots", [0, -3])
def test_a_tier_without_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"1 slot or more, not {num_slots}"):
        CpuTier(num_slots, LruPolicy(1))


def test_a_policy_in_use_is_refused() -> None:
    policy = LruPolicy(4)
    policy.add(key(1))
    with pytest.raises(ValueError, match="already holds 1 keys"):
        CpuTier(4, policy)


class Careless(LruPolicy):
    """Evicts what the test names."""

    answer: Sequence[OffloadKey] | None = None

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        return None if self.answer is None else list(self.answer)


@pytest.mark.parametrize(
    "answer", [keys(1), keys(1, 2, 3), keys(1, 1), keys(1, 1, 3), keys(1, 4), keys(1, 5), keys(1, 6), keys(1, 9), []]
)
def test_a_policy_that_evicts_what_it_must_not_is_refused(answer: list[OffloadKey]) -> None:
    policy = Careless(6)
    made = CpuTier(6, policy)
    for number in range(1, 6):
        store(made, number)
    made.allocate(keys(6))
    made.pin(keys(4))
    before = books(made)
    policy.answer = answer
    with pytest.raises(PolicyError, match=f"Careless gave {len(answer)} victims that are not 2 different chunks"):
        made.allocate(keys(7, 8), frozenset(keys(5)))
    assert books(made) == before
    policy.answer = keys(3, 1)
    assert made.allocate(keys(7, 8), frozenset(keys(5))) == Allocation([0, 2], keys(3, 1))


class Unasked(LruPolicy):
    """Must not be called, for it would have to look at every key."""

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        raise AssertionError("victims were requested")


def test_an_allocation_that_cannot_be_is_refused_without_a_search() -> None:
    made = CpuTier(4, Unasked(4))
    store(made, 1, 2)
    made.allocate(keys(3))
    made.pin(keys(1))
    assert made.allocate(keys(5, 6, 7)) is None
    assert made.allocate(keys(5, 6), frozenset(keys(2))) is None


def test_a_policy_without_victims_refuses_the_allocation() -> None:
    made = CpuTier(2, Careless(2))
    store(made, 1, 2)
    assert made.allocate(keys(3)) is None
    assert (made.refused_total, made.ready_keys()) == (1, keys(1, 2))
