# SPDX-License-Identifier: Apache-2.0
"""Chunks that only the source's disk holds: read into its CPU tier and lent, within bounds, or a miss with its reason."""

from __future__ import annotations

import pytest

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer import lender as lending
from kvrouter.engine_patch.offload.peer.lender import ON_DISK
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_wire import MAX_KEYS, Borrow, Lent, Return
from kvrouter.engine_patch.offload.tiers import guests
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState
from kvrouter.engine_patch.offload.tiers.tiering import LookupAnswer, PromotionRequest
from tests.support.peer_world import CHUNK_BYTES, TIMEOUT_S, Engine, World, is_ready, key

YES, NO, SOON, UNKNOWN = LookupAnswer.YES, LookupAnswer.NO, LookupAnswer.SOON, LookupAnswer.UNKNOWN
SLOTS = 8


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def reader(world: World) -> Engine:
    return world.engine("reader", 64)


def keys(first: int, last: int) -> list[OffloadKey]:
    return [key(number) for number in range(first, last)]


def make_source(world: World, num_chunks: int = 4, num_slots: int = SLOTS, lends_disk: bool = True) -> Engine:
    """Return an engine whose disk holds chunks 0 to `num_chunks - 1`, and whose CPU tier holds others."""
    engine = world.engine("source", num_slots, has_disk=True, lends_disk=lends_disk)
    for number in range(num_chunks):
        engine.store(key(number))
    for number in range(100, 100 + num_slots):
        engine.store(key(number))
    assert not any(is_ready(engine, each) for each in keys(0, num_chunks))
    engine.disk.most_jobs = 0
    return engine


@pytest.fixture
def source(world: World) -> Engine:
    return make_source(world)


def borrow(
    source: Engine, number: int, *borrowed: OffloadKey, reader: bytes = b"reader", loan_s: float = 2.0
) -> object:
    """Borrow chunks without an engine that reads them, and return the answer, if it is there at once."""
    source.lender._readers[reader] = None
    return source.lender.answer(reader, Borrow(number, source.tiers.num_resets, loan_s, list(borrowed)), 100.0)


def advance(source: Engine, turns: int = 10) -> list[Lent]:
    """Let the thread that lends work, and return its answers."""
    answers: list[Lent] = []
    for _ in range(turns):
        answers += [answer for _, answer in source.lender.advance() if isinstance(answer, Lent)]
    source.read_changes()
    return answers


def misses(engine: Engine) -> dict[PeerMiss, int]:
    return {miss: count for miss, count in engine.peers.misses.items() if count}


def test_chunks_on_the_disk_are_read_lent_and_announced(source: Engine, reader: Engine) -> None:
    assert reader.fetch(reader.wish(source), *keys(0, 4)) == [YES] * 4
    assert reader.peers.pulled == 4 and not misses(reader)
    source.read_changes()
    assert source.announced >= set(keys(0, 4))
    assert source.lender.counts.lent == source.lender.counts.lent_from_disk == 4
    assert source.lender.lent_chunks == 0 and source.cpu.usage.pinned == 0


def test_a_source_whose_setting_is_off_lends_its_cpu_tier_alone(world: World, reader: Engine) -> None:
    source = make_source(world, lends_disk=False)
    assert reader.fetch(reader.wish(source), key(0), key(107)) == [NO, YES]
    assert misses(reader) == {PeerMiss.ABSENT: 1} and not source.disk.jobs


def test_chunks_of_both_tiers_come_in_one_pull(source: Engine, reader: Engine) -> None:
    assert reader.fetch(reader.wish(source), key(0), key(107), key(999), key(1)) == [YES, YES, NO, YES]
    assert misses(reader) == {PeerMiss.ABSENT: 1}


def test_nothing_is_read_for_a_question(source: Engine, reader: Engine) -> None:
    reader.step(reader.wish(source), *keys(0, 4))
    assert source.disk.most_jobs == 0


def test_an_idle_source_reads_lends_and_is_woken_to_announce(source: Engine, reader: Engine) -> None:
    woken: list[None] = []
    source.tiers.wake = lambda: woken.append(None)
    # Only the thread that lends works at the source: none of its steps is run.
    assert reader.fetch(reader.wish(source), key(0)) == [YES]
    assert woken


def test_a_chunk_that_the_disk_cannot_read_is_a_miss_with_its_reason(source: Engine, reader: Engine) -> None:
    wish = reader.wish(source)
    # The source is queried, and then the disk fails.
    assert reader.step(wish, key(0), key(107)) == [UNKNOWN, UNKNOWN]
    source.disk.fails = True
    assert reader.fetch(wish, key(0), key(107)) == [NO, YES]
    assert misses(reader) == {PeerMiss.DISK: 1}
    assert source.lender.counts.disk_failed == 1
    source.read_changes()


def test_a_disk_that_hangs_costs_the_reader_its_deadline_and_the_source_no_slot(
    world: World, source: Engine, reader: Engine
) -> None:
    source.disk.hangs = True
    wish = reader.wish(source)
    assert reader.fetch(wish, *keys(0, 2)) == [SOON, SOON]
    # The source's own requests go on.
    source.store(key(50))
    own = PromotionRequest()
    assert source.tiers.look_up(key(50), own) is YES
    source.tiers.end_step()
    world.now_s += TIMEOUT_S
    assert reader.fetch(wish, *keys(0, 2)) == [NO, NO]
    assert misses(reader) == {PeerMiss.DEADLINE: 2}
    for _ in range(3):
        world.turn()
    assert not source.lender.is_waiting and source.lender.counts.disk_late == 2
    source.disk.hangs = False
    source.tiers.end_step()
    source.read_changes()
    assert source.cpu.usage.writing == source.cpu.usage.pinned == 0


def test_a_loan_whose_reader_is_gone_ends_while_it_waits(source: Engine) -> None:
    source.disk.hangs = True
    assert borrow(source, 1, key(0), key(107)) is None
    source.lender.expire(103.0)
    assert not source.lender.is_waiting and source.lender.lent_chunks == 0 and source.cpu.usage.pinned == 0
    assert source.lender.counts.expired_loans == source.lender.counts.disk_late == 1


def test_a_reset_while_a_loan_waits_lends_nothing(world: World, source: Engine, reader: Engine) -> None:
    source.disk.hangs = True
    wish = reader.wish(source)
    assert reader.fetch(wish, key(0), key(107)) == [SOON, SOON]
    source.reset()
    source.disk.hangs = False
    assert reader.fetch(wish, key(0), key(107)) == [NO, NO]
    assert misses(reader) == {PeerMiss.RESETS: 2}
    source.read_changes()
    assert source.cpu.usage.free == SLOTS


def test_chunks_that_change_while_their_checksums_are_computed_are_not_lent(source: Engine) -> None:
    checksum = source.lender._checksum

    def reset_first(chunk: OffloadKey, slot: int) -> int:
        source.tiers.reset()
        source.slot(slot)[:] = bytes(CHUNK_BYTES)
        return checksum(chunk, slot)

    source.lender._checksum = reset_first
    answer = borrow(source, 1, key(107))
    assert isinstance(answer, Lent) and answer.slots == [lending.OTHER_WEIGHTS]
    assert source.lender.lent_chunks == 0


def test_a_pull_of_more_than_can_be_lent_at_once_waits_for_what_is_returned(world: World) -> None:
    source = make_source(world, num_chunks=12)
    most = source.lender._max_lent_chunks
    for number in range(3):
        assert borrow(source, number, *keys(number * most, (number + 1) * most)) is None
    assert most == 4
    for number in range(3):
        (lent,) = advance(source)
        assert lent.number == number and min(lent.slots) >= 0
        assert source.lender.lent_chunks <= most
        source.lender.answer(b"reader", Return(number), 100.0)
    assert source.lender.lent_chunks == 0 and source.lender.counts.lent_from_disk == 12


def test_a_loan_larger_than_all_that_can_be_lent_is_cut_with_a_reason(world: World, reader: Engine) -> None:
    source = make_source(world, num_chunks=6)
    answers = reader.fetch(reader.wish(source), *keys(0, 6))
    assert answers == [YES] * 4 + [NO] * 2
    assert misses(reader) == {PeerMiss.BUSY: 2}


def test_two_loans_that_are_both_too_large_end(world: World) -> None:
    source = make_source(world, num_chunks=14)
    assert borrow(source, 1, *keys(0, 7)) is None
    assert borrow(source, 2, *keys(7, 14)) is None
    (first,) = advance(source)
    assert [slot >= 0 for slot in first.slots] == [True] * 4 + [False] * 3
    source.lender.answer(b"reader", Return(1), 100.0)
    (second,) = advance(source)
    assert [slot >= 0 for slot in second.slots] == [True] * 4 + [False] * 3


def test_a_later_loan_takes_no_room_that_an_earlier_one_waits_for(world: World) -> None:
    source = make_source(world, num_chunks=8)
    source.disk.hangs = True
    assert borrow(source, 1, *keys(0, 4)) is None
    assert borrow(source, 2, key(106), key(107)) is None
    assert source.lender.lent_chunks == 0
    source.disk.hangs = False
    (first,) = advance(source)
    assert first.number == 1 and min(first.slots) >= 0


def test_a_reader_evicts_no_more_than_a_bounded_part_of_the_sources_memory(world: World, reader: Engine) -> None:
    source = make_source(world, num_chunks=40, num_slots=16)
    kept = [each for each in keys(108, 116) if is_ready(source, each)]
    assert len(kept) == 8
    for first in range(0, 40, 4):
        assert reader.fetch(reader.wish(source), *keys(first, first + 4)) == [YES] * 4
    source.read_changes()
    assert all(is_ready(source, each) for each in kept)


def test_few_chunks_are_read_at_once_so_that_a_local_request_need_not_wait_for_many(world: World) -> None:
    source = make_source(world, num_chunks=8, num_slots=16)
    source.disk.hangs = True
    borrow(source, 1, *keys(0, 8))
    advance(source)
    assert source.disk.most_jobs == 16 // guests.READ_SHARE
    wish = PromotionRequest()
    assert source.tiers.look_up(key(7), wish) is SOON
    source.tiers.end_step()
    assert source.disk.jobs[-1].key == key(7)


def test_a_chunk_that_a_local_request_is_reading_is_lent_when_it_has_arrived(source: Engine) -> None:
    source.disk.hangs = True
    source.tiers.look_up(key(0), PromotionRequest())
    source.tiers.end_step()
    assert borrow(source, 1, key(0)) is None
    assert len(source.disk.jobs) == 1
    source.disk.hangs = False
    (lent,) = advance(source)
    assert lent.slots[0] >= 0


def test_nothing_is_evicted_while_the_source_decides_about_a_step(source: Engine) -> None:
    wish = PromotionRequest()
    assert source.tiers.look_up(key(100), wish) is YES
    assert borrow(source, 1, *keys(0, 4)) is None
    assert not advance(source) and not source.disk.jobs and is_ready(source, key(100))
    source.tiers.begin_load([key(100)], wish)
    source.tiers.end_step()
    assert len(advance(source)) == 1


def test_a_source_without_a_free_slot_refuses_at_once(source: Engine, reader: Engine) -> None:
    source.cpu.pin(source.cpu.ready_keys())
    assert reader.fetch(reader.wish(source), key(0)) == [NO]
    assert misses(reader) == {PeerMiss.BUSY: 1}


def test_a_chunk_that_a_waiting_request_needs_makes_no_room(world: World) -> None:
    source = make_source(world, num_chunks=4, num_slots=2)
    # One of two slots is for guests; the request waits for the other.
    wish = PromotionRequest()
    source.disk.hangs = True
    assert source.tiers.look_up(key(0), wish) is SOON
    source.tiers.end_step()
    assert source.cpu.state(key(0)) is ChunkState.WRITING
    assert source.tiers.look_up(key(101), wish) is YES
    assert source.tiers.look_up(key(0), wish) is SOON
    source.tiers.end_step()
    answer = borrow(source, 1, key(1))
    assert isinstance(answer, Lent) and answer.slots == [lending.LENT_TOO_MUCH] and is_ready(source, key(101))


def test_a_guest_that_a_waiting_request_needs_does_not_leave_for_another(source: Engine, reader: Engine) -> None:
    # There is room for these four guests.
    assert reader.fetch(reader.wish(source), *keys(0, 4)) == [YES] * 4
    source.disk.hangs = True
    wish = PromotionRequest()
    assert [source.tiers.look_up(each, wish) for each in (key(0), key(100))] == [YES, SOON]
    source.tiers.end_step()
    assert borrow(source, 1, key(101)) is None
    assert is_ready(source, key(0)) and not is_ready(source, key(1))


def test_a_reset_ends_the_stay_of_all_guests(source: Engine, reader: Engine) -> None:
    assert reader.fetch(reader.wish(source), *keys(0, 4)) == [YES] * 4
    source.reset()
    # Now these are chunks of the source's own requests.
    for number in range(4):
        source.store(key(number))
    source.disk.records[key(9)] = bytes(CHUNK_BYTES)
    assert borrow(source, 1, key(9)) is None
    assert all(is_ready(source, each) for each in keys(0, 4))


def test_the_keys_that_wait_are_bounded(source: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MAX_WAITING_CHUNKS", 2)
    source.disk.hangs = True
    assert borrow(source, 1, key(0), key(1)) is None
    answer = borrow(source, 2, key(2))
    assert isinstance(answer, Lent) and answer.slots == [lending.LENT_TOO_MUCH]
    # So is each turn, whatever readers want.
    assert lending.TURN_CHUNKS < MAX_KEYS


def test_no_reader_is_sent_a_slot_that_is_not_there_yet(world: World, reader: Engine) -> None:
    source = make_source(world, num_chunks=8)
    seen: set[int] = set()

    def look(answer: object) -> object:
        if isinstance(answer, Lent):
            seen.update(answer.slots)
        return answer

    world.forge = look  # type: ignore[assignment]
    reader.fetch(reader.wish(source), *keys(0, 8), key(999))
    assert seen and ON_DISK not in seen


def test_a_fault_while_a_loan_waits_ends_the_loan(source: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source.disk.hangs = True
    assert borrow(source, 1, key(0), key(107)) is None

    def fail(*arguments: object) -> list[int]:
        raise RuntimeError("a fault for a test")

    monkeypatch.setattr(source.tiers, "lend", fail)
    with pytest.raises(RuntimeError):
        list(source.lender.advance())
    assert not source.lender.is_waiting and source.lender.lent_chunks == 0 and source.cpu.usage.pinned == 0
