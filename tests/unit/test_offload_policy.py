# SPDX-License-Identifier: Apache-2.0
"""Duties of every eviction policy, the further rules of LRU, and how a policy is found by name."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator

import pytest

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy
from kvrouter.engine_patch.offload.tiers.policy import BUILT_IN, METHODS, Policy, PolicyError, make_policy

MODULE = "kvrouter_test_policies"


def keys(*numbers: int) -> list[OffloadKey]:
    return [pack(number.to_bytes(8, "big"), 0) for number in numbers]


def number(key: OffloadKey) -> int:
    return int.from_bytes(key[:8], "big")


def numbers(found: list[OffloadKey] | None) -> list[int] | None:
    return None if found is None else [number(key) for key in found]


def anything(_: OffloadKey) -> bool:
    return True


def all_but(*in_use: int) -> Callable[[OffloadKey], bool]:
    return lambda key: number(key) not in in_use


class Counting:
    """A may_evict function that counts its calls."""

    def __init__(self, *in_use: int) -> None:
        self.in_use = set(in_use)
        self.asked = 0

    def __call__(self, key: OffloadKey) -> bool:
        self.asked += 1
        return number(key) not in self.in_use


def filled(policy: Policy, *wanted: int) -> Policy:
    for key in keys(*wanted):
        policy.add(key)
        policy.evictable_again(key)
    return policy


class PolicyContract:
    """Contract of a policy that has a capacity of 8 and 8 keys that were used once each, 1 the oldest."""

    @pytest.fixture
    def policy(self) -> Policy:
        raise NotImplementedError

    def test_the_oldest_keys_are_victims_and_leave_the_policy(self, policy: Policy) -> None:
        assert numbers(policy.victims(3, anything)) == [1, 2, 3]
        assert len(policy) == 5
        assert numbers(policy.victims(5, anything)) == [4, 5, 6, 7, 8]
        assert len(policy) == 0
        assert policy.victims(1, anything) is None

    def test_zero_victims_are_always_available(self, policy: Policy) -> None:
        assert policy.victims(0, anything) == []
        assert policy.victims(0, all_but(*range(9))) == []
        assert len(policy) == 8
        policy.clear()
        assert policy.victims(0, anything) == []

    def test_too_few_victims_are_none_and_change_nothing(self, policy: Policy) -> None:
        assert policy.victims(9, anything) is None
        assert policy.victims(7, all_but(2, 5)) is None
        assert len(policy) == 8
        assert numbers(policy.victims(8, anything)) == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_keys_in_use_are_passed_over(self, policy: Policy) -> None:
        assert numbers(policy.victims(6, all_but(1, 4))) == [2, 3, 5, 6, 7, 8]
        assert len(policy) == 2

    def test_a_key_passed_over_returns_as_the_youngest(self, policy: Policy) -> None:
        assert numbers(policy.victims(2, all_but(1, 2))) == [3, 4]
        for key in keys(2, 1):
            policy.evictable_again(key)
        assert numbers(policy.victims(6, anything)) == [5, 6, 7, 8, 2, 1]

    def test_returning_a_key_leaves_the_order_of_others(self, policy: Policy) -> None:
        policy.evictable_again(keys(1)[0])
        assert numbers(policy.victims(1, anything)) == [1]
        policy.evictable_again(keys(1)[0])
        assert len(policy) == 7

    def test_a_key_in_use_is_looked_up_once(self, policy: Policy) -> None:
        in_use = Counting(1, 2, 3, 4)
        policy.victims(1, in_use)
        before = in_use.asked
        policy.victims(1, in_use)
        assert in_use.asked == before + 1 == 6

    def test_a_touched_key_outlives_the_others(self, policy: Policy) -> None:
        policy.touch(keys(1)[0])
        assert numbers(policy.victims(7, anything)) == [2, 3, 4, 5, 6, 7, 8]

    def test_touching_what_is_absent_changes_nothing(self, policy: Policy) -> None:
        policy.touch(keys(9)[0])
        assert len(policy) == 8

    def test_a_key_passed_over_then_touched_stays_out_of_reach(self, policy: Policy) -> None:
        policy.victims(1, all_but(1))
        policy.touch(keys(1)[0])
        assert len(policy) == 7
        # Key 1 is still in use.
        assert numbers(policy.victims(6, all_but(1))) == [3, 4, 5, 6, 7, 8]
        policy.evictable_again(keys(1)[0])
        assert numbers(policy.victims(1, anything)) == [1]

    def test_a_discarded_key_is_no_victim(self, policy: Policy) -> None:
        policy.discard(keys(2)[0])
        policy.discard(keys(2)[0])
        assert len(policy) == 7
        assert numbers(policy.victims(2, anything)) == [1, 3]

    def test_a_key_passed_over_can_be_discarded(self, policy: Policy) -> None:
        policy.victims(1, all_but(1))
        policy.discard(keys(1)[0])
        policy.evictable_again(keys(1)[0])
        assert len(policy) == 6
        assert numbers(policy.victims(6, anything)) == [3, 4, 5, 6, 7, 8]

    def test_a_clear_forgets_all_keys(self, policy: Policy) -> None:
        policy.victims(1, all_but(1))
        policy.clear()
        assert len(policy) == 0
        assert policy.victims(1, anything) is None
        policy.evictable_again(keys(1)[0])
        assert len(policy) == 0
        assert numbers(filled(policy, 2, 1).victims(2, anything)) == [2, 1]


class TestLru(PolicyContract):
    @pytest.fixture
    def policy(self) -> Policy:
        return filled(make_policy("lru", 8), *range(1, 9))

    def test_keys_are_ordered_by_their_last_use(self, policy: Policy) -> None:
        for key in keys(3, 1, 3):
            policy.touch(key)
        policy.victims(1, anything, keys(9))
        policy.add(keys(9)[0])
        assert numbers(policy.victims(8, anything)) == [4, 5, 6, 7, 8, 1, 3, 9]


class TestArc(PolicyContract):
    @pytest.fixture
    def policy(self) -> Policy:
        return filled(make_policy("arc", 8), *range(1, 9))


class Smallest:
    """Policy of a third party, which evicts the keys with the lowest bytes and sets nothing aside."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: set[OffloadKey] = set()

    def add(self, key: OffloadKey) -> None:
        self.held.add(key)

    def touch(self, key: OffloadKey) -> None:
        pass

    def discard(self, key: OffloadKey) -> None:
        self.held.discard(key)

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: object = ()
    ) -> list[OffloadKey] | None:
        victims = sorted(filter(may_evict, self.held))[:count]
        if len(victims) < count:
            return None
        self.held.difference_update(victims)
        return victims

    def evictable_again(self, key: OffloadKey) -> None:
        pass

    def clear(self) -> None:
        self.held.clear()

    def __len__(self) -> int:
        return len(self.held)


class Halting:
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("out of order")


class HalfDone(Smallest):
    victims = None  # type: ignore[assignment]
    evictable_again = None  # type: ignore[assignment]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    policies = types.ModuleType(MODULE)
    vars(policies).update(Smallest=Smallest, Halting=Halting, HalfDone=HalfDone, nothing=None)
    monkeypatch.setitem(sys.modules, MODULE, policies)
    yield policies


def test_a_third_party_can_add_a_policy(module: types.ModuleType) -> None:
    policy = filled(make_policy(f"{MODULE}:Smallest", 12), 3, 1, 2)
    assert isinstance(policy, Smallest)
    assert policy.capacity == 12
    assert numbers(policy.victims(2, anything)) == [1, 2]


def test_built_in_policies_are_found_by_name() -> None:
    assert type(make_policy("lru", 1)) is LruPolicy
    assert set(BUILT_IN) == {"lru", "arc"}


def test_the_required_methods_are_those_of_the_interface() -> None:
    declared = {
        name
        for name, value in vars(Policy).items()
        if inspect.isfunction(value) and value.__module__ == Policy.__module__
    }
    assert set(METHODS) == declared - {"__init__"}


@pytest.mark.parametrize("name", ["lfu", "", ":Class", "module:", "LRU"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(PolicyError, match=f"no eviction policy '{name}'.*arc, lru, or package.module:Class"):
        make_policy(name, 8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "kvrouter_no_such_module:A",
            "importing kvrouter_no_such_module failed .ModuleNotFoundError: .*environment of the engine",
        ),
        (".relative:A", "importing .relative failed .TypeError"),
        (f"{MODULE}:Absent", f"module {MODULE} has no Absent"),
        (f"{MODULE}:Halting", r"Halting\(8\) failed .RuntimeError: out of order.*capacity in chunks"),
        (f"{MODULE}:nothing", r"nothing\(8\) failed .TypeError"),
        (
            f"{MODULE}:HalfDone",
            "HalfDone lacks victims, evictable_again; see kvrouter.engine_patch.offload.tiers.policy.Policy",
        ),
    ],
)
def test_a_policy_that_cannot_be_had_says_what_was_tried(module: types.ModuleType, name: str, said: str) -> None:
    with pytest.raises(PolicyError, match=f"eviction policy '{name}': {said}"):
        make_policy(name, 8)


@pytest.mark.parametrize("capacity", [0, -1])
def test_no_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(PolicyError, match=f"1 chunk or more, not {capacity}"):
        make_policy("lru", capacity)
