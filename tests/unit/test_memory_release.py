# SPDX-License-Identifier: Apache-2.0
"""Rule for giving memory back to the system; tests/contract/test_free_memory.py checks that the system gets it."""

from __future__ import annotations

from kvrouter.router.app.server.memory_release import MIN_RISE_BYTES, STANDS_BYTES, ReleaseRule

MIB = 1024**2


def test_a_release_is_due_when_memory_rose_and_rises_no_more() -> None:
    rule = ReleaseRule()
    looks = [100 * MIB, 120 * MIB, 140 * MIB, 140 * MIB + STANDS_BYTES - 1]
    assert [rule.is_due(size_bytes) for size_bytes in looks] == [False, False, False, True]


def test_a_release_that_gave_nothing_back_is_not_repeated() -> None:
    rule = ReleaseRule()
    rule.is_due(100 * MIB)
    assert not rule.is_due(140 * MIB) and rule.is_due(140 * MIB)
    rule.begin(140 * MIB)
    assert not any(rule.is_due(140 * MIB + MIN_RISE_BYTES - 1) for _ in range(3))


def test_a_fall_of_memory_lowers_the_base_of_the_next_rise() -> None:
    rule = ReleaseRule()
    for size_mib in (140, 100, 117):
        assert not rule.is_due(size_mib * MIB)
    assert rule.is_due(117 * MIB)


def test_a_large_process_needs_a_larger_rise() -> None:
    rule = ReleaseRule()
    for size_mib in (1_000, 1_090, 1_090, 1_101):
        assert not rule.is_due(size_mib * MIB)
    assert rule.is_due(1_101 * MIB)
