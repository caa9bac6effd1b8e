# SPDX-License-Identifier: Apache-2.0
"""How many different prompts began with each piece."""

from __future__ import annotations

import random

from kvrouter.router.load.prefix_popularity import PrefixPopularity


def test_a_beginning_counts_the_prompts_that_go_on_differently() -> None:
    popular = PrefixPopularity()
    popular.placed([1, 2, 3])
    assert popular.counts([1, 2, 3]) == [1, 1, 1]
    # The next turn of the same chat, and the same prompt again, are no new prompts.
    popular.placed([1, 2, 3, 4])
    popular.placed([1, 2, 3, 4])
    popular.placed([1, 2])
    assert popular.counts([1, 2, 3, 4]) == [1, 1, 1, 1]
    popular.placed([1, 2, 9])
    popular.placed([1, 2, 10])
    assert popular.counts([1, 2, 3]) == [3, 3, 1] and popular.counts([1, 2, 9]) == [3, 3, 1]
    assert popular.counts([7, 1]) == [] and popular.counts([]) == []


def test_counts_are_those_of_a_tree_of_all_prompts() -> None:
    rng = random.Random(1)
    popular, leaves = PrefixPopularity(), set[tuple[int, ...]]()
    children: dict[tuple[int, ...], set[int]] = {}
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(2_000):
        path = tuple(rng.randrange(3) for _ in range(rng.randint(1, 6)))
        known = next(k for k in range(len(path), -1, -1) if k == 0 or path[:k] in counts)
        is_other = 0 < known < len(path) and bool(children.get(path[:known]))
        for length in range(1, len(path) + 1):
            before = counts.get(path[:length])
            counts[path[:length]] = 1 if before is None else before + is_other
            children.setdefault(path[: length - 1], set()).add(path[length - 1])
        leaves.add(path)
        names = [hash(path[:length]) for length in range(1, len(path) + 1)]
        popular.placed(names)
        assert popular.counts(names) == [counts[path[:length]] for length in range(1, len(path) + 1)]


def test_memory_is_bounded_and_what_is_in_use_stays() -> None:
    popular = PrefixPopularity(max_names=100)
    for number in range(10_000):
        popular.placed([1, 2, 1_000 + number])
        assert len(popular) <= 104
    assert popular.counts([1, 2])[0] == 10_000
    assert popular.counts([1_000]) == []
