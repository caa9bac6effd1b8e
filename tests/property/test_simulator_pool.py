# SPDX-License-Identifier: Apache-2.0
"""Random operations on the pool against a list of blocks kept by hand."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrouter.simulator.cache.pool import Block, BlockPool, Key, Removed
from tests.support.examples import examples

BLOCKS = 9


def key(group_idx: int, n: int) -> Key:
    return Key(group_idx, bytes([n]) * 32)


class PoolMachine(RuleBasedStateMachine):
    """A pool of blocks and its model: a queue of ids, a list of (id, key) in the order of caching, and holds by id."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.queue = list(range(1, BLOCKS))
        self.carried: list[tuple[int, Key]] = []
        self.holds: dict[int, int] = dict.fromkeys(range(1, BLOCKS), 0)
        self.blocks: dict[int, Block] = {}

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > len(self.queue):
            return
        expected, self.queue = self.queue[:count], self.queue[count:]
        taken = self.pool.take(count)
        assert [block.block_id for block in taken] == expected
        removed = [k for i in expected for block_id, k in self.carried if block_id == i]
        assert self.pool.take_events() == [Removed(k) for k in removed]
        self.carried = [pair for pair in self.carried if pair[0] not in expected]
        for block in taken:
            self.holds[block.block_id] = 1
            self.blocks[block.block_id] = block

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data(), group_idx=st.integers(0, 1), n=st.integers(0, 3))
    def cache(self, data: st.DataObject, group_idx: int, n: int) -> None:
        held = data.draw(st.sampled_from([i for i, count in self.holds.items() if count]))
        new = (held, key(group_idx, n)) not in self.carried
        assert self.pool.cache(self.blocks[held], key(group_idx, n)) == new
        if new:
            self.carried.append((held, key(group_idx, n)))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.blocks)))
        self.pool.touch([self.blocks[block_id], self.pool.null])
        self.holds[block_id] += 1
        if block_id in self.queue:
            self.queue.remove(block_id)

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [i for i, count in self.holds.items() if count]
        chosen = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1))
        self.pool.release([self.blocks[i] for i in chosen])
        for block_id in chosen:
            self.holds[block_id] -= 1
        free = [i for i in chosen if not self.holds[i]]
        keyed = [i for i in free if any(block_id == i for block_id, _ in self.carried)]
        self.queue = [i for i in free if i not in keyed] + self.queue + keyed

    @rule()
    def reset(self) -> None:
        possible = not any(self.holds.values())
        assert self.pool.reset() == possible
        self.pool.take_events()
        if possible:
            self.carried = []

    @invariant()
    def same(self) -> None:
        assert self.pool.free_order() == self.queue
        for group_idx in (0, 1):
            for n in range(4):
                copies = [block_id for block_id, k in self.carried if k == key(group_idx, n)]
                assert self.pool.copies(key(group_idx, n)) == len(copies)
                blocks = self.pool.find([group_idx], key(group_idx, n).block_hash)
                assert [block.block_id for block in blocks or []] == copies[:1]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=40)
