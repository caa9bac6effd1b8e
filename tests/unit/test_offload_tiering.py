# SPDX-License-Identifier: Apache-2.0
"""Moves between the tiers and their announcements, with a disk that does its jobs on request, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.cpu_tier import CpuTier
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy
from kvrouter.engine_patch.offload.tiers.tiering import (
    PATIENCE_STEPS,
    LookupAnswer,
    Medium,
    PromotionRequest,
    TierChange,
    Tiering,
)
from tests.support.queued_disk import DiskJob, QueuedDisk

CPU, DISK = Medium.CPU, Medium.STORAGE


def key(number: int, group_idx: int = 0) -> OffloadKey:
    return pack(number.to_bytes(32, "big"), group_idx)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


class SlowDisk(QueuedDisk[None]):
    """Disk whose jobs end in their order, when the test says so."""

    def __init__(self, *found: OffloadKey, max_queued: int = 100) -> None:
        super().__init__()
        self.records.update(dict.fromkeys(found))
        self.closed = False
        self._max_queued = max_queued
        self._done: list[DiskJob] = []

    @property
    def pending(self) -> int:
        return len(self.jobs) + len(self._done)

    def _queue(self, job: DiskJob) -> bool:
        return len(self.jobs) < self._max_queued and super()._queue(job)

    def end(self, count: int = 1, ok: bool = True) -> None:
        for _ in range(count):
            job = self.jobs.pop(0)
            self._done.append(job._replace(ok=ok))
            if job.kind == "write" and ok:
                self.records[job.key] = None
                self._changes.append((True, job.key))
            elif job.kind == "read" and not ok and self.records.pop(job.key, 0) is None:
                self._changes.append((False, job.key))

    def poll(self) -> Sequence[DiskJob]:
        finished, self._done = self._done, []
        return finished

    def close(self) -> None:
        self.closed = True


def tiering(slots: int, disk: SlowDisk | None = None) -> Tiering:
    return Tiering(CpuTier(slots, LruPolicy(slots)), disk)


def store(tiers: Tiering, wanted: Sequence[OffloadKey]) -> list[OffloadKey]:
    begun = tiers.begin_store(wanted)
    assert begun is not None
    tiers.end_store(begun[0], True)
    return begun[0]


def ask(tiers: Tiering, wanted: Sequence[OffloadKey], wish: PromotionRequest) -> list[LookupAnswer]:
    """Look the keys of one request up, in a step of their own."""
    answers = [tiers.look_up(chunk, wish) for chunk in wanted]
    tiers.end_step()
    return answers


def test_a_chunk_is_available_once_its_store_has_ended() -> None:
    tiers, wish = tiering(4), PromotionRequest()
    assert ask(tiers, keys(1), wish) == [LookupAnswer.NO]
    assert tiers.begin_store(keys(1, 2)) == (keys(1, 2), [0, 1])
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.SOON] * 2
    assert tiers.take_changes() == []
    tiers.end_store(keys(1, 2), True)
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.YES] * 2
    assert tiers.take_changes() == [TierChange(CPU, False, keys(1, 2))]
    assert tiers.begin_load(keys(2, 1), wish) == [1, 0]
    assert not tiers.busy


def test_a_failed_store_leaves_and_announces_nothing() -> None:
    tiers = tiering(2)
    assert tiers.begin_store(keys(1, 2)) is not None
    tiers.end_store(keys(1, 2), False)
    assert ask(tiers, keys(1), PromotionRequest()) == [LookupAnswer.NO] and tiers.take_changes() == []
    assert store(tiers, keys(3, 4)) == keys(3, 4)


def test_a_present_chunk_is_not_stored_again_but_becomes_young() -> None:
    tiers = tiering(3)
    store(tiers, keys(1, 2, 3))
    assert tiers.begin_store(keys(1, 2)) == ([], [])
    tiers.take_changes()
    store(tiers, keys(4))
    assert tiers.take_changes() == [TierChange(CPU, True, keys(3)), TierChange(CPU, False, keys(4))]


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    tiers = tiering(4)
    store(tiers, keys(1, 2, 3, 4))
    tiers.take_changes()
    store(tiers, keys(5, 6))
    assert tiers.take_changes() == [TierChange(CPU, True, keys(4, 3)), TierChange(CPU, False, keys(5, 6))]


def test_a_store_without_room_is_refused_whole_and_counted() -> None:
    tiers = tiering(2)
    store(tiers, keys(1))
    assert tiers.begin_load(keys(1), PromotionRequest()) == [0]
    assert tiers.begin_store(keys(2, 3)) is None and tiers.counts.stores_refused == 1
    tiers.end_load(keys(1))
    assert store(tiers, keys(2, 3)) == keys(2, 3)


def test_a_stored_chunk_is_written_to_disk_and_then_announced() -> None:
    disk = SlowDisk()
    tiers = tiering(2, disk)
    store(tiers, keys(1, 2))
    tiers.take_changes()
    assert [(job.kind, job.key, job.slot) for job in disk.jobs] == [("write", key(1), 0), ("write", key(2), 1)]
    # The disk still reads its slot.
    assert tiers.begin_store(keys(3)) is None
    disk.end()
    assert tiers.busy and tiers.take_changes() == [TierChange(DISK, False, keys(1))]
    assert store(tiers, keys(3)) == keys(3)
    assert tiers.take_changes() == [TierChange(CPU, True, keys(1)), TierChange(CPU, False, keys(3))]
    disk.end(2)
    assert tiers.take_changes() == [TierChange(DISK, False, keys(2, 3))]
    assert not tiers.busy


def test_a_chunk_on_its_way_to_disk_is_not_written_twice() -> None:
    disk = SlowDisk()
    tiers = tiering(2, disk)
    store(tiers, keys(1))
    tiers.reset()
    store(tiers, keys(1))
    assert len(disk.jobs) == 1 and tiers.counts.writes_skipped == 0


def test_writes_that_the_disk_cannot_take_are_counted() -> None:
    disk = SlowDisk(max_queued=1)
    tiers = tiering(3, disk)
    store(tiers, keys(1, 2, 3))
    assert tiers.counts.writes_skipped == 2 and len(disk.jobs) == 1


def test_chunks_of_an_earlier_engine_are_announced_and_promoted_on_demand() -> None:
    disk = SlowDisk(*keys(1, 2))
    tiers, wish = tiering(2, disk), PromotionRequest()
    assert tiers.busy and tiers.take_changes() == [TierChange(DISK, False, keys(1, 2))]
    assert ask(tiers, keys(1, 2, 3), wish) == [LookupAnswer.SOON, LookupAnswer.SOON, LookupAnswer.NO]
    disk.end()
    # Results of the disk are taken up at the end of a step.
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.SOON] * 2
    disk.end()
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.YES, LookupAnswer.SOON]
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.YES] * 2
    assert tiers.take_changes() == [TierChange(CPU, False, keys(1, 2))]
    assert tiers.begin_load(keys(1, 2), wish) == [0, 1]
    assert wish.promoted == set(keys(1, 2)) and tiers.counts.promoted == 2
    # The chunk is still on disk, so it is not written again.
    assert not disk.jobs


def test_a_request_without_disk_use_reads_nothing_from_disk() -> None:
    disk = SlowDisk(*keys(1))
    tiers = tiering(2, disk)
    assert tiers.look_up(key(1), PromotionRequest(), disk=False) is LookupAnswer.NO
    tiers.end_step()
    assert not disk.jobs


def test_a_record_that_cannot_be_read_is_gone_and_the_request_continues() -> None:
    disk = SlowDisk(*keys(1))
    tiers, wish = tiering(2, disk), PromotionRequest()
    tiers.take_changes()
    ask(tiers, keys(1), wish)
    disk.end(ok=False)
    tiers.end_step()
    assert ask(tiers, keys(1), wish) == [LookupAnswer.NO]
    assert tiers.take_changes() == [TierChange(DISK, True, keys(1))]
    assert tiers.counts.promotions_failed == 1
    assert store(tiers, keys(2, 3)) == keys(2, 3)


def test_chunks_of_a_waiting_request_are_not_evicted() -> None:
    disk = SlowDisk(*keys(2))
    tiers, wish = tiering(2, disk), PromotionRequest()
    store(tiers, keys(1))
    disk.end()
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.YES, LookupAnswer.SOON]
    assert tiers.begin_store(keys(3)) is None
    disk.end()
    tiers.end_step()
    assert tiers.begin_store(keys(3)) is None
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.YES] * 2
    tiers.begin_load(keys(1, 2), wish)
    tiers.end_load(keys(1, 2))
    assert store(tiers, keys(3)) == keys(3)


def test_what_a_waiting_request_falls_back_on_does_not_make_room_for_what_it_waits_for() -> None:
    """A model with states: the prompt can end at block 1, and vLLM looks for the state at block 3 while that is pending."""
    disk = SlowDisk(key(2), key(3, 1))
    tiers, wish = tiering(3, disk), PromotionRequest()
    store(tiers, [key(1, 1), key(1)])
    store(tiers, keys(9))
    disk.end(3)
    assert ask(tiers, [key(1), key(2), key(3, 1)], wish) == [LookupAnswer.YES, LookupAnswer.SOON, LookupAnswer.SOON]
    assert ask(tiers, [key(1), key(1, 1)], wish) == [LookupAnswer.YES] * 2
    assert tiers.counts.promotions_refused == 1


def test_chunks_that_a_waiting_request_found_earlier_are_not_evicted() -> None:
    disk = SlowDisk(*keys(2))
    tiers, wish = tiering(2, disk), PromotionRequest()
    store(tiers, keys(1))
    disk.end()
    ask(tiers, keys(2, 1), wish)
    assert ask(tiers, keys(2), wish) == [LookupAnswer.SOON]
    assert tiers.begin_store(keys(3)) is None


@pytest.mark.parametrize("ends", ["forgotten", "no longer requested"])
def test_a_request_that_ended_keeps_no_chunk(ends: str) -> None:
    disk = SlowDisk(*keys(1, 2))
    tiers, wish = tiering(2, disk), PromotionRequest()
    ask(tiers, keys(1, 2), wish)
    disk.end(2)
    if ends == "forgotten":
        tiers.forget(wish)
    else:
        for _ in range(PATIENCE_STEPS + 2):
            tiers.end_step()
    tiers.take_changes()
    assert store(tiers, keys(3, 4)) == keys(3, 4)


def test_a_promotion_without_room_is_refused() -> None:
    disk = SlowDisk(*keys(1, 2, 3))
    tiers, wish = tiering(2, disk), PromotionRequest()
    assert ask(tiers, keys(1, 2, 3), wish) == [LookupAnswer.SOON] * 3
    assert tiers.counts.promotions_refused == 1
    disk.end(2)
    tiers.end_step()
    assert ask(tiers, keys(1, 2, 3), wish) == [LookupAnswer.YES, LookupAnswer.YES, LookupAnswer.NO]


def test_a_full_queue_of_reads_is_tried_again() -> None:
    disk = SlowDisk(*keys(1, 2), max_queued=1)
    tiers, wish = tiering(4, disk), PromotionRequest()
    ask(tiers, keys(1, 2), wish)
    assert len(disk.jobs) == 1
    disk.end()
    assert ask(tiers, keys(1, 2), wish)[1] is LookupAnswer.SOON
    ask(tiers, keys(1, 2), wish)
    disk.end()
    tiers.end_step()
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.YES] * 2


def test_a_reset_empties_both_tiers_and_says_so() -> None:
    disk = SlowDisk(*keys(9))
    tiers = tiering(2, disk)
    store(tiers, keys(1, 2))
    disk.end()
    tiers.take_changes()
    tiers.reset()
    assert tiers.take_changes() == [TierChange(CPU, True, keys(1, 2)), TierChange(DISK, True, keys(9, 1))]
    assert ask(tiers, keys(1, 2, 9), PromotionRequest()) == [LookupAnswer.NO] * 3
    # The disk still reads the slot of chunk 2; the other slot is free.
    assert tiers.begin_store(keys(3, 4)) is None
    assert store(tiers, keys(3)) == keys(3)
    disk.end()
    tiers.end_step()
    assert store(tiers, keys(4)) == keys(4)


def test_chunks_of_different_groups_are_separate() -> None:
    tiers = tiering(4)
    store(tiers, [key(1, 0), key(1, 1)])
    assert ask(tiers, [key(1, 0), key(1, 1), key(1, 2)], PromotionRequest()) == [
        LookupAnswer.YES,
        LookupAnswer.YES,
        LookupAnswer.NO,
    ]


def test_closing_closes_the_disk() -> None:
    disk = SlowDisk()
    tiering(1, disk).close()
    assert disk.closed


def test_a_chunk_awaited_in_vain_is_reported_once() -> None:
    disk = SlowDisk(*keys(1, 2, 3))
    tiers, wish, other_wish = tiering(4, disk), PromotionRequest(), PromotionRequest()
    tiers.take_changes()
    assert ask(tiers, keys(1, 2), wish) == [LookupAnswer.SOON] * 2
    assert ask(tiers, keys(3), other_wish) == [LookupAnswer.SOON]
    disk.end(1)
    disk.end(1, ok=False)
    tiers.end_step()
    assert tiers.take_missed() == []
    tiers.forget(wish)
    # Chunk 1 is in memory; the other request still waits for its own chunk.
    assert tiers.take_missed() == keys(2)
    assert tiers.take_missed() == []
    disk.end(1, ok=False)
    tiers.end_step()
    tiers.forget(other_wish)
    assert tiers.take_missed() == keys(3)
    assert tiers.begin_store(keys(4)) is not None
    tiers.end_store(keys(4), False)
    assert tiers.take_missed() == keys(4)


def test_a_chunk_that_another_request_awaits_is_not_reported_missing() -> None:
    disk = SlowDisk(*keys(1))
    tiers, wish, other_wish = tiering(1, disk), PromotionRequest(), PromotionRequest()
    assert tiers.look_up(key(1), wish) is tiers.look_up(key(1), other_wish) is LookupAnswer.SOON
    tiers.forget(wish)
    assert tiers.take_missed() == []


def test_missing_chunks_are_not_collected_without_announcements() -> None:
    tiers = Tiering(CpuTier(2, LruPolicy(2)), SlowDisk(*keys(1)), announce=False)
    wish = PromotionRequest()
    assert tiers.look_up(key(1), wish) is LookupAnswer.SOON
    tiers.forget(wish)
    assert tiers.take_missed() == []


def test_nothing_is_read_from_disk_until_the_workers_are_done_with_what_a_reset_freed() -> None:
    disk = SlowDisk()
    tiers, wish = tiering(2, disk), PromotionRequest()
    store(tiers, keys(1))
    tiers.reset(hold=True)
    disk.end()
    disk.records[key(2)] = None
    assert ask(tiers, keys(2), wish) == [LookupAnswer.NO] and not disk.jobs
    tiers.end_hold()
    assert ask(tiers, keys(2), wish) == [LookupAnswer.SOON] and disk.jobs
