# SPDX-License-Identifier: Apache-2.0
"""Books of the CPU tier after each call, and the calls that they forbid."""

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
    """Return a tier that holds these chunks, the oldest first."""
    cpu_tier = CpuTier(num_slots, make_policy(policy, num_slots))
    for number in ready:
        store(cpu_tier, number)
    return cpu_tier


def store(cpu_tier: CpuTier, *numbers: int, protected: frozenset[OffloadKey] = frozenset()) -> Allocation | None:
    allocation = cpu_tier.allocate(keys(*numbers), protected)
    if allocation is not None:
        for number in numbers:
            cpu_tier.ready(key(number))
    return allocation


def books(cpu_tier: CpuTier) -> tuple[object, ...]:
    slots = {chunk: cpu_tier.slot(chunk) for chunk in cpu_tier.ready_keys()}
    return cpu_tier.usage, slots, sorted(cpu_tier.busy_slots())


def oldest_first(cpu_tier: CpuTier) -> list[OffloadKey]:
    """Evict everything, and return the chunks in the order of their eviction."""
    ready = len(cpu_tier.ready_keys())
    allocation = cpu_tier.allocate(keys(*range(900, 900 + cpu_tier.num_slots)))
    assert allocation is not None
    assert len(allocation.evicted) == ready
    return allocation.evicted


def test_a_chunk_is_absent_then_writing_then_ready() -> None:
    cpu_tier = tier(4)
    assert cpu_tier.state(key(1)) is ABSENT
    assert cpu_tier.allocate(keys(1, 2)) == Allocation([0, 1], [])
    assert [cpu_tier.state(chunk) for chunk in keys(1, 2, 3)] == [WRITING, WRITING, ABSENT]
    assert [cpu_tier.slot(chunk) for chunk in keys(1, 2)] == [0, 1]
    cpu_tier.ready(key(2))
    assert [cpu_tier.state(chunk) for chunk in keys(1, 2)] == [WRITING, READY]
    assert cpu_tier.ready_keys() == keys(2)
    assert cpu_tier.usage == Usage(num_slots=4, free=2, writing=1, ready=1, pinned=0, withheld=0)


def test_an_abandoned_slot_is_free_at_once() -> None:
    cpu_tier = tier(2)
    cpu_tier.allocate(keys(1, 2))
    cpu_tier.abandon(key(1))
    assert cpu_tier.state(key(1)) is ABSENT
    assert cpu_tier.allocate(keys(3)) == Allocation([0], [])


def test_the_oldest_chunk_is_evicted_and_its_slot_used_again() -> None:
    cpu_tier = tier(3, 1, 2, 3)
    cpu_tier.touch(keys(1))
    assert cpu_tier.allocate(keys(4, 5)) == Allocation([2, 1], keys(2, 3))
    assert [cpu_tier.state(chunk) for chunk in keys(1, 2, 3, 4, 5)] == [READY, ABSENT, ABSENT, WRITING, WRITING]
    assert cpu_tier.evicted_total == 2


def test_free_slots_are_used_before_anything_is_evicted() -> None:
    cpu_tier = tier(3, 1)
    assert store(cpu_tier, 2, 3) == Allocation([1, 2], [])
    allocation = store(cpu_tier, 4, 5)
    assert allocation is not None
    assert len(allocation.evicted) == 2


def test_an_allocation_without_room_for_all_keys_changes_nothing() -> None:
    cpu_tier = tier(4, 1, 2)
    cpu_tier.allocate(keys(3))
    before = books(cpu_tier)
    assert cpu_tier.allocate(keys(4, 5, 6, 7)) is None
    assert cpu_tier.allocate(keys(*range(10, 20))) is None
    assert books(cpu_tier) == before
    assert [cpu_tier.state(chunk) for chunk in keys(1, 2, 3, 4)] == [READY, READY, WRITING, ABSENT]
    assert (cpu_tier.refused_total, cpu_tier.evicted_total) == (2, 0)
    allocation = cpu_tier.allocate(keys(4, 5, 6))
    assert allocation is not None
    assert allocation.evicted == keys(1, 2)


def test_an_empty_allocation_needs_no_room() -> None:
    cpu_tier = tier(1, 1)
    cpu_tier.pin(keys(1))
    assert cpu_tier.allocate([]) == Allocation([], [])


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_chunks_in_use_are_not_evicted(policy: str) -> None:
    cpu_tier = tier(5, 1, 2, 3, 4, policy=policy)
    cpu_tier.pin(keys(1))
    cpu_tier.allocate(keys(5))
    allocation = cpu_tier.allocate(keys(6), frozenset(keys(2)))
    assert allocation is not None
    assert allocation.evicted == keys(3)
    # Only chunk 4 could go.
    before = books(cpu_tier)
    assert cpu_tier.allocate(keys(7, 8), frozenset(keys(2))) is None
    assert books(cpu_tier) == before


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_chunks_are_evictable_again_after_their_use(policy: str) -> None:
    cpu_tier = tier(5, 1, 2, 3, 4, policy=policy)
    cpu_tier.pin(keys(1))
    cpu_tier.allocate(keys(5))
    # The search passes over the pinned chunk and the protected one.
    cpu_tier.allocate(keys(6), frozenset(keys(2)))
    cpu_tier.unpin(keys(1))
    cpu_tier.ready(key(5))
    cpu_tier.ready(key(6))
    assert sorted(oldest_first(cpu_tier)) == keys(1, 2, 4, 5, 6)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_chunk_passed_over_while_written_is_evictable_when_ready(policy: str) -> None:
    cpu_tier = tier(2, policy=policy)
    cpu_tier.allocate(keys(1))
    store(cpu_tier, 2)
    assert cpu_tier.allocate(keys(3)) == Allocation([1], keys(2))
    cpu_tier.ready(key(3))
    cpu_tier.ready(key(1))
    assert oldest_first(cpu_tier) == keys(3, 1)


def test_the_tail_of_pinned_chunks_is_evicted_before_the_head() -> None:
    cpu_tier = tier(3, 1, 2, 3)
    cpu_tier.pin(keys(1, 2))
    store(cpu_tier, 4)
    cpu_tier.unpin(keys(1, 2))
    assert oldest_first(cpu_tier) == keys(4, 2, 1)


def test_a_protected_key_that_is_also_pinned_waits_for_its_pin() -> None:
    cpu_tier = tier(3, 1, 2, 3)
    cpu_tier.pin(keys(1))
    cpu_tier.allocate(keys(4), frozenset(keys(1)))
    cpu_tier.ready(key(4))
    assert cpu_tier.allocate(keys(5, 6, 7)) is None
    cpu_tier.unpin(keys(1))
    assert oldest_first(cpu_tier) == keys(3, 4, 1)


def test_protected_keys_need_not_be_there() -> None:
    cpu_tier = tier(2, 1, 2)
    assert cpu_tier.allocate(keys(3, 4), frozenset(keys(3, 4, 5, 6, 7))) == Allocation([1, 0], keys(1, 2))


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    cpu_tier = tier(6)
    store(cpu_tier, 1, 2, 3)
    store(cpu_tier, 4, 5, 6)
    assert oldest_first(cpu_tier) == keys(3, 2, 1, 6, 5, 4)
    cpu_tier = tier(3, 1, 2, 3)
    cpu_tier.touch(keys(1, 2))
    assert oldest_first(cpu_tier) == keys(3, 2, 1)


def test_pins_are_counted() -> None:
    cpu_tier = tier(2, 1, 2)
    cpu_tier.pin(keys(1, 1, 2))
    cpu_tier.pin(keys(1))
    assert cpu_tier.usage.pinned == 2
    cpu_tier.unpin(keys(1, 2))
    assert cpu_tier.busy_slots() == [cpu_tier.slot(key(1))] * 2
    assert cpu_tier.allocate(keys(3, 4)) is None
    cpu_tier.unpin(keys(1, 1))
    assert cpu_tier.allocate(keys(3, 4)) is not None


def test_touching_ignores_chunks_that_are_not_ready() -> None:
    cpu_tier = CpuTier(3, policy := make_policy("arc", 3))
    cpu_tier.allocate(keys(1, 2))
    cpu_tier.touch(keys(1, 2, 3))
    cpu_tier.ready(key(1))
    cpu_tier.ready(key(2))
    store(cpu_tier, 3)
    # If 1 were in T2, then 2 and 3 would go first.
    assert len(policy) == 3
    assert oldest_first(cpu_tier) == keys(2, 1, 3)


def test_only_ready_unpinned_chunks_are_discarded() -> None:
    cpu_tier = tier(3, 1, 2)
    cpu_tier.allocate(keys(3))
    cpu_tier.pin(keys(2))
    assert [cpu_tier.discard(chunk) for chunk in keys(1, 2, 3, 4, 1)] == [True, False, False, False, False]
    assert cpu_tier.usage == Usage(num_slots=3, free=1, writing=1, ready=1, pinned=1, withheld=0)
    assert cpu_tier.allocate(keys(5)) == Allocation([0], [])


def test_clear_withholds_the_slots_of_transfers_under_way() -> None:
    cpu_tier = tier(4, 1, 2, 3)
    cpu_tier.allocate(keys(4))
    cpu_tier.pin(keys(2, 2))
    assert sorted(cpu_tier.busy_slots()) == [1, 1, 3]
    assert cpu_tier.clear() == keys(1, 2, 3)
    assert cpu_tier.usage == Usage(num_slots=4, free=2, writing=0, ready=0, pinned=0, withheld=2)
    assert [cpu_tier.state(chunk) for chunk in keys(1, 2, 3, 4)] == [ABSENT] * 4
    assert cpu_tier.allocate(keys(1, 2)) == Allocation([0, 2], [])
    assert cpu_tier.allocate(keys(3)) is None
    cpu_tier.release(1)
    assert cpu_tier.allocate(keys(3)) is None
    cpu_tier.release(1)
    assert cpu_tier.allocate(keys(3)) == Allocation([1], [])
    cpu_tier.release(3)
    assert cpu_tier.allocate(keys(4)) == Allocation([3], [])


def test_a_caller_may_name_the_busy_slots_of_a_clear() -> None:
    cpu_tier = tier(3, 1, 2)
    cpu_tier.allocate(keys(3))
    assert cpu_tier.clear([0]) == keys(1, 2)
    assert cpu_tier.allocate(keys(1, 2)) == Allocation([1, 2], [])
    assert cpu_tier.usage.withheld == 1


def test_a_second_clear_keeps_the_withheld_slots() -> None:
    cpu_tier = tier(3, 1, 2)
    cpu_tier.pin(keys(1))
    cpu_tier.clear()
    store(cpu_tier, 5)
    cpu_tier.pin(keys(5))
    # Slot 0 is named again, but for the same transfer.
    assert cpu_tier.clear([0, 0, 1]) == keys(5)
    assert cpu_tier.usage.withheld == 2
    cpu_tier.release(0)
    cpu_tier.release(1)
    assert cpu_tier.usage == Usage(num_slots=3, free=3, writing=0, ready=0, pinned=0, withheld=0)


def test_an_emptied_tier_forgets_its_order() -> None:
    cpu_tier = tier(2, 1, 2)
    cpu_tier.clear()
    store(cpu_tier, 2)
    store(cpu_tier, 1)
    assert oldest_first(cpu_tier) == keys(2, 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda cpu_tier: cpu_tier.allocate(keys(9, 1)), "is READY and cannot be allocated again"),
        (lambda cpu_tier: cpu_tier.allocate(keys(2)), "is WRITING and cannot be allocated again"),
        (lambda cpu_tier: cpu_tier.allocate(keys(9, 8, 9)), "a key comes twice"),
        (lambda cpu_tier: cpu_tier.slot(key(9)), "is ABSENT and has no slot"),
        (lambda cpu_tier: cpu_tier.ready(key(1)), "is READY and cannot become READY"),
        (lambda cpu_tier: cpu_tier.ready(key(9)), "is ABSENT and cannot become READY"),
        (lambda cpu_tier: cpu_tier.abandon(key(1)), "is READY and cannot be abandoned"),
        (lambda cpu_tier: cpu_tier.abandon(key(9)), "is ABSENT and cannot be abandoned"),
        (lambda cpu_tier: cpu_tier.pin(keys(1, 2)), "is WRITING and cannot be pinned"),
        (lambda cpu_tier: cpu_tier.pin(keys(1, 9)), "is ABSENT and cannot be pinned"),
        (lambda cpu_tier: cpu_tier.unpin(keys(1)), "is READY and has 0 pins, 1 of them cannot be taken back"),
        (lambda cpu_tier: cpu_tier.unpin(keys(3, 3)), "is READY and has 1 pins, 2 of them cannot be taken back"),
        (lambda cpu_tier: cpu_tier.release(0), "slot 0 is not withheld"),
        (lambda cpu_tier: cpu_tier.clear([4]), "slot 4 cannot be withheld: this tier has slots 0 to 3"),
        (lambda cpu_tier: cpu_tier.clear([0, -1]), "slot -1 cannot be withheld"),
    ],
)
def test_a_call_that_the_state_forbids_changes_nothing(call: Callable[[CpuTier], object], said: str) -> None:
    cpu_tier = tier(4, 1, 3)
    cpu_tier.allocate(keys(2))
    cpu_tier.pin(keys(3))
    before = books(cpu_tier)
    with pytest.raises(WrongState, match=said):
        call(cpu_tier)
    assert books(cpu_tier) == before


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
    """LRU policy that evicts the chunks that the test names."""

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
    cpu_tier = CpuTier(6, policy)
    for number in range(1, 6):
        store(cpu_tier, number)
    cpu_tier.allocate(keys(6))
    cpu_tier.pin(keys(4))
    before = books(cpu_tier)
    policy.answer = answer
    with pytest.raises(PolicyError, match=f"Careless gave {len(answer)} victims that are not 2 different chunks"):
        cpu_tier.allocate(keys(7, 8), frozenset(keys(5)))
    assert books(cpu_tier) == before
    policy.answer = keys(3, 1)
    assert cpu_tier.allocate(keys(7, 8), frozenset(keys(5))) == Allocation([0, 2], keys(3, 1))


class Unasked(LruPolicy):
    """LRU policy that must not be called, because it would have to look at every key."""

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        raise AssertionError("victims were requested")


def test_an_impossible_allocation_is_refused_without_a_search() -> None:
    cpu_tier = CpuTier(4, Unasked(4))
    store(cpu_tier, 1, 2)
    cpu_tier.allocate(keys(3))
    cpu_tier.pin(keys(1))
    assert cpu_tier.allocate(keys(5, 6, 7)) is None
    assert cpu_tier.allocate(keys(5, 6), frozenset(keys(2))) is None


def test_a_policy_without_victims_refuses_the_allocation() -> None:
    cpu_tier = CpuTier(2, Careless(2))
    store(cpu_tier, 1, 2)
    assert cpu_tier.allocate(keys(3)) is None
    assert (cpu_tier.refused_total, cpu_tier.ready_keys()) == (1, keys(1, 2))
