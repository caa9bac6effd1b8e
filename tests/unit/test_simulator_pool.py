# SPDX-License-Identifier: Apache-2.0
"""Laws of the block pool."""

from __future__ import annotations

import pytest

from kvrouter.simulator.cache.pool import BlockPool, Cleared, Key, PoolExhausted, Removed


def key(n: int, group_idx: int = 0) -> Key:
    return Key(group_idx, n.to_bytes(32, "big"))


def test_blocks_are_taken_in_order_of_id_and_block_0_never() -> None:
    pool = BlockPool(4)
    assert [block.block_id for block in pool.take(3)] == [1, 2, 3]
    with pytest.raises(PoolExhausted):
        pool.take(1)


def test_a_request_freed_in_reverse_loses_its_tail_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for n, block in enumerate(blocks):
        pool.cache(block, key(n))
    pool.release(reversed(blocks))
    assert pool.free_order() == [3, 2, 1]
    pool.take(2)
    assert pool.take_events() == [Removed(key(2)), Removed(key(1))]
    assert pool.find([0], key(0).block_hash) == [blocks[0]]


def test_blocks_without_a_key_are_taken_first() -> None:
    pool = BlockPool(6)
    first, second, third, fourth, fifth = pool.take(5)
    pool.cache(first, key(1))
    pool.cache(third, key(3))
    pool.release([first])
    pool.release([second, third, fourth])
    pool.release([fifth])
    assert pool.free_order() == [5, 2, 4, 1, 3]


def test_each_copy_counts_and_each_is_removed_once() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.cache(first, key(7))
    pool.cache(second, key(7))
    assert pool.copies(key(7)) == 2
    assert pool.find([0], key(7).block_hash) == [first]
    pool.release([first, second])
    pool.take(1)
    assert pool.take_events() == [Removed(key(7))]
    assert pool.find([0], key(7).block_hash) == [second]
    pool.take(1)
    assert pool.find([0], key(7).block_hash) is None


def test_a_group_does_not_find_the_blocks_of_another() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.cache(first, key(7, 0))
    assert pool.find([1], key(7).block_hash) is None
    assert pool.find([0, 1], key(7).block_hash) is None
    pool.cache(second, key(7, 1))
    assert pool.find([1, 0], key(7).block_hash) == [second, first]


def test_a_touched_block_is_not_evicted() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.cache(first, key(1))
    pool.cache(second, key(2))
    pool.release([first, second])
    pool.touch([first])
    assert pool.take(1) == [second]
    assert pool.take_events() == [Removed(key(2))]
    pool.release([first])
    assert first.refs == 0


def test_a_block_held_twice_is_free_only_after_both_let_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.touch([block])
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_the_null_block_is_neither_held_nor_freed() -> None:
    pool = BlockPool(2)
    pool.touch([pool.null])
    pool.release([pool.null, pool.null])
    assert pool.free_order() == [1]
    assert pool.null.refs == 0


def test_a_block_with_two_keys_loses_both_the_full_one_first() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    assert pool.cache(block, key(1))
    assert pool.cache(block, key(2))
    assert not pool.cache(block, key(2))
    pool.release([block])
    pool.take(1)
    assert pool.take_events() == [Removed(key(1)), Removed(key(2))]


def test_reset_waits_until_nothing_is_held() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.cache(first, key(1))
    pool.release([second])
    assert not pool.reset()
    assert pool.take_events() == []
    pool.release([first])
    assert pool.reset()
    assert pool.take_events() == [Cleared()]
    assert pool.resident() == {}
    pool.take(2)
    assert pool.take_events() == []


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least one more"):
        BlockPool(1)
