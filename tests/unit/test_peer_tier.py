# SPDX-License-Identifier: Apache-2.0
"""Chunks fetched from another engine: the right content, or a miss with its reason, within the deadline."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import pytest

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.lender import NO_SLOT
from kvrouter.engine_patch.offload.peer.peer_link import LOAN_MARGIN_S, RETRY_S, Pulled, PullJob
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import (
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    PeerSource,
    SourceWish,
    source_wish,
)
from kvrouter.engine_patch.offload.peer.peer_wire import (
    MAX_LOAN_S,
    Borrow,
    Lent,
    Present,
    Return,
    Unknown,
    read_by_reader,
    read_by_source,
)
from kvrouter.engine_patch.offload.peer.shares import shares
from kvrouter.engine_patch.offload.tiers.tiering import LookupAnswer, PromotionRequest
from kvrouter.engine_patch.offload.tiers.warming import Warming
from kvrouter.events.peer.hand_over import Refused, WarmEnd
from tests.support.peer_world import CHUNK_BYTES, IDENTITY, TIMEOUT_S, Engine, World, is_ready, key

YES, NO, SOON, UNKNOWN = LookupAnswer.YES, LookupAnswer.NO, LookupAnswer.SOON, LookupAnswer.UNKNOWN


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def lender(world: World) -> Engine:
    engine = world.engine("lender")
    engine.store(key(1), key(2), key(3))
    return engine


@pytest.fixture
def reader(world: World) -> Engine:
    return world.engine("reader")


class Live(NamedTuple):
    """A request that is not over."""

    engine: Engine
    wish: PromotionRequest
    wanted: list[OffloadKey]


def misses(engine: Engine) -> dict[PeerMiss, int]:
    return {miss: count for miss, count in engine.peers.misses.items() if count}


def test_chunks_that_the_source_holds_are_fetched_and_announced(lender: Engine, reader: Engine) -> None:
    wish = reader.wish(lender)
    assert reader.step(wish, key(1), key(2)) == [UNKNOWN, UNKNOWN]
    assert reader.fetch(wish, key(1), key(2)) == [YES, YES]
    assert reader.announced == {key(1), key(2)}
    assert reader.peers.pulled == 2 and not misses(reader)
    assert lender.lender.lent_chunks == 0 and lender.cpu.usage.pinned == 0


def test_a_request_without_a_source_fetches_nothing(lender: Engine, reader: Engine) -> None:
    wish = reader.wish(lender)
    wish.peer = None
    assert reader.step(wish, key(1)) == [NO]


def test_a_chunk_that_the_source_lacks_is_computed(lender: Engine, reader: Engine) -> None:
    assert reader.fetch(reader.wish(lender), key(1), key(9)) == [YES, NO]
    assert misses(reader) == {PeerMiss.ABSENT: 1}
    # Nothing was evicted for it.
    assert reader.cpu.usage.free == 7


def test_a_lent_chunk_is_not_evicted(world: World, lender: Engine, reader: Engine) -> None:
    reader.plane.hangs = True
    reader.step(reader.wish(lender), key(1))
    wish = reader.wish(lender)
    reader.step(wish, key(1))
    reader.step(wish, key(1))
    world.turn()
    assert lender.cpu.usage.pinned == 1
    lender.store(*map(key, range(20, 27)))
    assert is_ready(lender, key(1))


def test_a_chunk_that_is_evicted_after_the_probe_is_a_miss(lender: Engine, reader: Engine) -> None:
    wish = reader.wish(lender)
    reader.step(wish, key(1))
    reader.step(wish, key(1))
    lender.cpu.discard(key(1))
    lender.announced.discard(key(1))
    assert reader.fetch(wish, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.EVICTED: 1}


def test_a_chunk_that_the_source_was_queried_for_is_not_the_next_to_be_evicted(lender: Engine, reader: Engine) -> None:
    wish = reader.wish(lender)
    reader.step(wish, key(1))
    reader.step(wish, key(1))
    # There is room for all but one of these and of the three that are there.
    lender.store(*map(key, range(20, 27)))
    assert reader.fetch(wish, key(1)) == [YES]


def test_a_source_that_hangs_costs_one_deadline_and_keeps_no_request(
    world: World, lender: Engine, reader: Engine
) -> None:
    reader.plane.hangs = True
    wish = reader.wish(lender)
    for _ in range(4):
        answers = reader.step(wish, key(1))
    assert answers == [SOON]
    world.now_s += TIMEOUT_S
    assert reader.step(wish, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.DEADLINE: 1}
    # Another request does not wait for the slot that may still be written, nor is that slot given away.
    other = reader.wish(lender)
    assert reader.step(other, key(1), key(2)) == [NO, UNKNOWN]
    assert reader.fetch(other, key(2)) == [NO]
    assert reader.peers.misses[PeerMiss.STALLED] == 1
    reader.store(*map(key, range(10, 30)))
    assert reader.cpu.usage.writing == 1
    assert not reader.tiers.busy
    # The transfer ends after all, and the source is used again.
    reader.plane.under_way[0].hangs = False
    reader.plane.hangs = False
    reader.step(reader.wish(lender))
    assert is_ready(reader, key(1))
    assert reader.fetch(reader.wish(lender), key(2)) == [YES]


def test_a_source_that_does_not_answer_costs_one_deadline_and_is_left_alone_for_a_while(
    world: World, reader: Engine
) -> None:
    absent = world.engine("absent")
    del world.engines["absent"]
    wish = reader.wish(absent)
    assert reader.step(wish, key(1)) == [UNKNOWN]
    world.now_s += TIMEOUT_S
    assert reader.step(wish, key(1)) == [NO]
    later = reader.wish(absent)
    assert reader.fetch(later, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.DEADLINE: 1, PeerMiss.GONE: 1}
    assert world.now_s == 100.0 + TIMEOUT_S


def test_a_source_that_missed_the_hello_before_a_loan_is_greeted_again(
    world: World, lender: Engine, reader: Engine
) -> None:
    reader.fetcher.submit(lender.source, PullJob(1, [key(1)], [0], 0, world.now_s + TIMEOUT_S))
    world.to_source.clear()
    world.now_s += TIMEOUT_S
    world.turn()
    assert reader.fetcher.outcomes == [Pulled(key(1), 0, PeerMiss.DEADLINE)]
    world.now_s += RETRY_S
    assert reader.fetch(reader.wish(lender), key(1)) == [YES]


def test_damaged_content_is_a_miss(lender: Engine, reader: Engine) -> None:
    reader.plane.damages = True
    assert reader.fetch(reader.wish(lender), key(1)) == [NO]
    assert misses(reader) == {PeerMiss.CHECKSUM: 1}


def test_the_content_of_another_block_is_a_miss(world: World, lender: Engine, reader: Engine) -> None:
    wish = reader.wish(lender)
    reader.step(wish, key(1))
    other = lender.lender.answer(b"reader", Borrow(98, 0, 1.0, [key(2)]), world.now_s)
    assert isinstance(other, Lent)
    # The slot and the checksum are those of the other block.
    world.forge = lambda answer: (
        msgspec.structs.replace(other, number=answer.number) if isinstance(answer, Lent) else answer
    )
    assert reader.fetch(wish, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.CHECKSUM: 1}


def lent_checksum(engine: Engine) -> int:
    """Return the checksum with which an engine lends chunk 1 to its reader."""
    loan = Borrow(98, engine.tiers.num_resets, 1.0, [key(1)])
    lent = engine.lender.answer(b"reader", loan, engine.world.now_s)
    assert isinstance(lent, Lent)
    engine.lender.answer(b"reader", Return(98), engine.world.now_s)
    return lent.checksums[0]


@pytest.mark.parametrize("end", ["discard", "evict", "reset"])
def test_the_checksum_of_a_lent_chunk_is_computed_once_until_the_chunk_ends(
    lender: Engine, reader: Engine, end: str
) -> None:
    reader.fetch(reader.wish(lender), key(3))
    first = lent_checksum(lender)
    lender.slot(lender.cpu.slot(key(1)))[0] ^= 1
    assert lent_checksum(lender) == first
    if end == "discard":
        assert lender.cpu.discard(key(1))
        lender.announced.discard(key(1))
    elif end == "evict":
        lender.store(*map(key, range(20, 28)))
    else:
        lender.reset()
    lender.store(key(1))
    lender.slot(lender.cpu.slot(key(1)))[0] ^= 1
    assert lent_checksum(lender) == lender.slots.checksum(key(1), lender.cpu.slot(key(1))) != first


def test_a_reset_while_checksums_are_computed_leaves_none_of_the_former_weights(
    lender: Engine, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.fetch(reader.wish(lender), key(3))
    checksum = lender.slots.checksum

    def reset_meanwhile(key: OffloadKey, slot: int) -> int:
        lender.reset()
        return checksum(key, slot)

    with monkeypatch.context() as patch:
        patch.setattr(lender.lender, "_checksum", reset_meanwhile)
        former = lent_checksum(lender)
    lender.store(key(1))
    assert lent_checksum(lender) == checksum(key(1), lender.cpu.slot(key(1))) != former


def test_a_source_that_dies_during_a_transfer_is_a_miss(lender: Engine, reader: Engine) -> None:
    reader.plane.fails = True
    assert reader.fetch(reader.wish(lender), key(1), key(2)) == [NO, NO]
    assert misses(reader) == {PeerMiss.GONE: 2}
    assert reader.cpu.usage.free == 8


def test_a_source_that_restarted_is_greeted_again(world: World, lender: Engine, reader: Engine) -> None:
    assert reader.fetch(reader.wish(lender), key(1)) == [YES]
    reborn = world.engine("lender")
    reborn.store(key(2))
    # The first request finds out; the next one is served.
    reader.fetch(reader.wish(reborn), key(2))
    assert reader.fetch(reader.wish(reborn), key(2)) == [YES]


def test_a_source_that_restarted_answers_the_question_that_found_out(
    world: World, lender: Engine, reader: Engine
) -> None:
    assert reader.fetch(reader.wish(lender), key(1)) == [YES]
    reborn = world.engine("lender")
    reborn.store(key(2))
    assert reader.fetch(reader.wish(reborn), key(2)) == [YES]
    assert not misses(reader)


def test_a_source_that_forgets_its_readers_at_once_is_a_miss(world: World, lender: Engine, reader: Engine) -> None:
    reader.fetch(reader.wish(lender), key(1))
    world.forge = lambda answer: Unknown(answer.number) if isinstance(answer, Present) else answer
    assert reader.fetch(reader.wish(lender), key(2)) == [NO]
    assert misses(reader) == {PeerMiss.GONE: 1}
    world.forge = lambda answer: answer
    assert reader.fetch(reader.wish(lender), key(2)) == [YES]


@pytest.mark.parametrize(
    ("identity", "root", "miss"), [(b"another", b"0", PeerMiss.LAYOUT), (IDENTITY, b"1", PeerMiss.SEED)]
)
def test_a_source_with_other_facts_lends_nothing(world: World, identity: bytes, root: bytes, miss: PeerMiss) -> None:
    lender, reader = world.engine("lender"), world.engine("reader", identity=identity, root=root)
    lender.store(key(1))
    assert reader.fetch(reader.wish(lender), key(1)) == [NO]
    assert misses(reader) == {miss: 1}
    assert lender.lender.counts.refused_readers == 1 and lender.lender.lent_chunks == 0


def test_engines_that_were_reset_unequally_often_exchange_nothing(lender: Engine, reader: Engine) -> None:
    reader.reset()
    assert reader.fetch(reader.wish(lender), key(1)) == [NO]
    assert misses(reader) == {PeerMiss.RESETS: 1}
    lender.reset()
    lender.store(key(1))
    assert reader.fetch(reader.wish(lender), key(1)) == [YES]


def test_a_source_that_is_reset_between_its_answers_lends_no_chunk_of_its_new_weights(
    lender: Engine, reader: Engine
) -> None:
    wish = reader.wish(lender)
    reader.step(wish, key(1))
    lender.reset()
    lender.store(key(1))
    assert reader.fetch(wish, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.RESETS: 1}
    assert reader.cpu.usage.free == 8


def test_a_reset_during_a_transfer_drops_what_arrives(world: World, lender: Engine, reader: Engine) -> None:
    reader.plane.hangs = True
    wish = reader.wish(lender)
    for _ in range(4):
        reader.step(wish, key(1))
    reader.reset()
    assert reader.cpu.usage.withheld == 1
    reader.plane.under_way[0].hangs = False
    reader.step(reader.wish(lender))
    assert reader.cpu.usage.free == 8 and not reader.announced


def test_a_transfer_from_before_a_reset_does_not_end_a_later_one_of_the_same_chunk(
    world: World, lender: Engine, reader: Engine
) -> None:
    other = world.engine("other")
    reader.plane.hangs = True
    for source in (lender, other):
        wish = reader.wish(source)
        for engine in (lender, other, reader):
            engine.reset()
        source.store(key(1))
        for _ in range(4):
            answers = reader.step(wish, key(1))
        assert answers == [SOON]
    reader.plane.under_way[0].hangs = False
    reader.step(wish, key(1))
    assert reader.cpu.usage.withheld == 0 and reader.cpu.usage.writing == 1
    assert reader.peers.pulled == 0 and not misses(reader)
    # The later transfer is still overdue at its deadline.
    world.now_s += TIMEOUT_S
    assert reader.step(wish, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.DEADLINE: 1}
    assert not reader.tiers.busy


def test_no_room_here_is_a_miss_and_evicts_nothing_that_is_needed(world: World, lender: Engine) -> None:
    reader = world.engine("reader", 2)
    reader.store(key(8), key(9))
    reader.tiers.begin_load([key(8), key(9)], reader.wish(lender))
    assert reader.fetch(reader.wish(lender), key(1)) == [NO]
    assert misses(reader) == {PeerMiss.NO_ROOM: 1}


def test_a_loan_ends_when_its_reader_is_gone(world: World, lender: Engine, reader: Engine) -> None:
    reader.plane.hangs = True
    wish = reader.wish(lender)
    for _ in range(3):
        reader.step(wish, key(1))
    assert lender.lender.lent_chunks == 1
    del world.engines["reader"]
    world.now_s += 10.0
    world.turn()
    assert lender.lender.lent_chunks == 0 and lender.lender.counts.expired_loans == 1


def test_a_source_lends_a_bounded_part_of_its_chunks(world: World, lender: Engine, reader: Engine) -> None:
    lender.store(*map(key, range(1, 8)))
    reader.plane.hangs = True
    wish = reader.wish(lender)
    for _ in range(4):
        reader.step(wish, *map(key, range(1, 8)))
    assert lender.lender.lent_chunks == 4
    assert misses(reader) == {PeerMiss.BUSY: 3}


def test_chunks_that_the_source_lacks_take_no_part_of_what_it_lends(
    world: World, lender: Engine, reader: Engine
) -> None:
    reader.fetch(reader.wish(lender), key(3))
    held = [key(1), key(2)]
    absent = [key(number) for number in range(20, 24)]
    lent = lender.lender.answer(b"reader", Borrow(98, 0, 1.0, [*absent, *held]), world.now_s)
    assert isinstance(lent, Lent)
    assert lent.slots == [NO_SLOT] * len(absent) + [lender.cpu.slot(chunk) for chunk in held]


@pytest.mark.parametrize("loan_s", [math.nan, math.inf, -1.0, 1e300])
def test_a_loan_is_bounded_whatever_its_reader_wants(
    world: World, lender: Engine, reader: Engine, loan_s: float
) -> None:
    reader.fetch(reader.wish(lender), key(3))
    assert isinstance(lender.lender.answer(b"reader", Borrow(98, 0, loan_s, [key(1)]), world.now_s), Lent)
    assert lender.lender.lent_chunks == 1
    lender.lender.expire(world.now_s + MAX_LOAN_S)
    assert lender.lender.lent_chunks == 0


def test_two_loans_of_one_number_are_refused(world: World, lender: Engine, reader: Engine) -> None:
    reader.fetch(reader.wish(lender), key(3))
    lender.lender.answer(b"reader", Borrow(98, 0, 1.0, [key(1)]), world.now_s)
    assert isinstance(lender.lender.answer(b"reader", Borrow(98, 0, 1.0, [key(2)]), world.now_s), Refused)
    assert lender.lender.lent_chunks == 1 and lender.lender.counts.bad_messages == 1


def test_a_second_end_of_a_transfer_is_not_that_of_the_next_one(lender: Engine, reader: Engine) -> None:
    assert reader.fetch(reader.wish(lender), key(1)) == [YES]
    slot = reader.cpu.slot(key(1))
    reader.cpu.discard(key(1))
    reader.announced.discard(key(1))
    wish = reader.wish(lender)
    reader.step(wish, key(2))
    reader.step(wish, key(2))
    assert reader.cpu.slot(key(2)) == slot
    reader.fetcher.outcomes += [Pulled(key(1), slot, None)]
    assert reader.fetch(wish, key(2)) == [YES]


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"remote_kv_source": None},
        {"remote_kv_source": {"remote_host": "h"}},
        {"remote_kv_source": {"remote_host": "", "remote_port": 1}},
        {"remote_kv_source": {"remote_host": "h" * 300, "remote_port": 1}},
        {"remote_kv_source": {"remote_host": "h", "remote_port": 0}},
        {"remote_kv_source": {"remote_host": "h", "remote_port": 70_000}},
        {"remote_kv_source": {"remote_host": "h", "remote_port": True}},
        {"remote_kv_source": ["h", 1]},
        {"remote_kv_source": {"remote_host": "h", "remote_port": "9" * 5_000}},
    ],
)
def test_an_incomplete_source_is_none(params: dict[str, object] | None) -> None:
    assert source_wish(params) is None


def test_a_source_is_read_from_the_fields_of_vllm() -> None:
    given = {"kv_request_id": "r", "remote_host": "10.0.0.1", "remote_port": "5710", "timeout_s": 0.2}
    assert source_wish({"remote_kv_source": given}) == SourceWish(PeerSource("10.0.0.1", 5710), 0.2)
    assert source_wish({"remote_kv_source": given | {"timeout_s": -1}}) == SourceWish(PeerSource("10.0.0.1", 5710))


@pytest.mark.parametrize(
    ("given", "timeout_s"),
    [(1e-9, MIN_TIMEOUT_S), (0.2, 0.2), (math.inf, MAX_TIMEOUT_S), (10**400, MAX_TIMEOUT_S), (math.nan, None)],
)
def test_a_timeout_is_brought_into_its_bounds(given: float, timeout_s: float | None) -> None:
    source = {"remote_host": "h", "remote_port": 1, "timeout_s": given}
    assert source_wish({"remote_kv_source": source}) == SourceWish(PeerSource("h", 1), timeout_s)


class Hint(NamedTuple):
    """An action, with the fields of vLLM's `KvHintAction`."""

    action_type: str
    action_version: str
    payload: Any


class Envelope(NamedTuple):
    actions: list[Hint]


@pytest.mark.parametrize(
    ("actions", "wish"),
    [
        ([("kvrouter.fetch", "1", {"host": "h", "port": 1, "timeout_s": 2})], SourceWish(PeerSource("h", 1), 2.0)),
        ([("kvrouter.fetch", "1", {"host": "h", "port": 1})], SourceWish(PeerSource("h", 1))),
        ([("pin", "1", {"host": "h", "port": 1})], None),
        ([("kvrouter.fetch", "2", {"host": "h", "port": 1})], None),
        ([("kvrouter.fetch", "1", {"host": "h"})], None),
        ([("kvrouter.fetch", "1", ["h", 1])], None),
        (
            [("kvrouter.fetch", "1", {}), ("kvrouter.fetch", "1", {"host": "h", "port": 1})],
            SourceWish(PeerSource("h", 1)),
        ),
        ([], None),
    ],
)
def test_a_source_is_read_from_an_action_of_ours(actions: list[tuple[Any, ...]], wish: SourceWish | None) -> None:
    envelope = Envelope([Hint(*action) for action in actions])
    assert source_wish(None, envelope) == wish
    assert source_wish({"remote_kv_source": {"remote_host": "x"}}, envelope) == wish
    named = {"remote_kv_source": {"remote_host": "first", "remote_port": 9}}
    assert source_wish(named, envelope) == SourceWish(PeerSource("first", 9))


def test_bytes_that_are_no_message_are_none() -> None:
    rng = random.Random(5)
    for size in range(200):
        noise = rng.randbytes(size)
        assert read_by_source(noise) is None and read_by_reader(noise) is None


def test_an_answer_of_another_length_is_a_miss(world: World, lender: Engine, reader: Engine) -> None:
    wish = reader.wish(lender)
    reader.fetch(reader.wish(lender), key(3))
    world.forge = lambda answer: Present(answer.number, b"\1\1\1") if isinstance(answer, Present) else answer
    assert reader.fetch(wish, key(1)) == [NO]
    assert misses(reader) == {PeerMiss.PROTOCOL: 1}


# Hand-overs


def divided_worlds(world: World) -> tuple[Engine, Engine]:
    """Return a source with two prompts of four chunks each, and an empty reader."""
    lender, reader = world.engine("lender", 16), world.engine("reader", 16)
    lender.store(*map(key, range(1, 5)))
    lender.store(*map(key, range(11, 15)))
    return lender, reader


def finish(world: World, engine: Engine, warming: Warming, turns: int = 40) -> None:
    """Let turns pass until the hand-over ends."""
    for _ in range(turns):
        world.turn()
        engine.read_changes()
        if warming.end and warming.batch is None:
            return
    raise AssertionError(f"the hand-over does not end: {warming.warmed()}")


def test_a_hand_over_brings_all_chunks_of_an_engine_without_a_step_of_either(world: World) -> None:
    lender, reader = divided_worlds(world)
    warming = reader.warm(lender)
    finish(world, reader, warming)
    assert warming.end == WarmEnd.COMPLETE
    assert reader.announced == lender.announced
    assert warming.warmed().fetched == 8 and warming.warmed().fetched_bytes == 8 * CHUNK_BYTES
    world.turn()
    assert not reader.tiers.busy and lender.cpu.usage.pinned == 0
    # Requests' own counts are untouched.
    assert reader.peers.pulled == 0 and not misses(reader) and reader.tiers.counts.handed_over == 8


def test_a_hand_over_keeps_the_order_of_worth_of_its_source(world: World) -> None:
    lender, reader = divided_worlds(world)
    warming = reader.warm(lender)
    # Several batches, the last of which would otherwise be the youngest.
    warming.batch_chunks = 3
    finish(world, reader, warming)
    world.turn()
    assert reader.cpu.by_worth() == lender.cpu.by_worth()


def test_the_source_values_its_chunks_as_before(world: World) -> None:
    lender, reader = divided_worlds(world)
    before = lender.cpu.by_worth()
    warming = reader.warm(lender)
    warming.batch_chunks = 3
    finish(world, reader, warming)
    assert lender.cpu.by_worth() == before


def test_a_full_engine_gives_up_its_least_valuable_part_for_the_most_valuable_of_the_source(world: World) -> None:
    lender, reader = world.engine("lender", 8), world.engine("reader", 8)
    for number in range(8):
        lender.store(key(number))
        reader.store(key(20 + number))
    warming = reader.warm(lender)
    finish(world, reader, warming)
    assert warming.end == WarmEnd.ROOM
    # Two engines become one, so each gives up half.
    assert reader.announced == {key(number) for number in (4, 5, 6, 7, 24, 25, 26, 27)}
    assert warming.warmed().evicted == 4


def test_nothing_that_a_request_is_about_to_load_makes_room(world: World) -> None:
    lender, reader = world.engine("lender", 4), world.engine("reader", 4)
    for number in range(4):
        lender.store(key(number))
        reader.store(key(20 + number))
    wish = reader.wish(lender)
    assert reader.tiers.look_up(key(20), wish) is YES
    warming = reader.warm(lender)
    for _ in range(10):
        world.turn()
    assert reader.tiers.begin_load([key(20)], wish)
    reader.tiers.end_step()
    finish(world, reader, warming)
    assert is_ready(reader, key(20)) and warming.warmed().fetched == 2


def test_a_hand_over_fetches_at_most_its_bytes(world: World) -> None:
    lender, reader = divided_worlds(world)
    warming = reader.warm(lender, max_chunks=3)
    finish(world, reader, warming)
    assert warming.end == WarmEnd.BYTES and len(reader.announced) == 3


def test_a_hand_over_ends_with_its_time(world: World) -> None:
    lender, reader = divided_worlds(world)
    lender.stopped = True
    warming = reader.warm(lender, within_s=0.5)
    for _ in range(3):
        world.turn()
    world.now_s += 1.0
    finish(world, reader, warming)
    assert warming.end == WarmEnd.TIME and reader.cpu.usage.free == 16


def test_chunks_that_are_here_already_are_passed_over(world: World) -> None:
    lender, reader = divided_worlds(world)
    reader.store(key(1), key(2))
    warming = reader.warm(lender)
    finish(world, reader, warming)
    assert (warming.warmed().present, warming.warmed().fetched) == (2, 6)


def test_a_source_that_does_not_answer_is_given_up(world: World, reader: Engine) -> None:
    absent = world.engine("absent")
    del world.engines["absent"]
    warming = reader.warm(absent)
    for _ in range(10):
        world.now_s += TIMEOUT_S
        world.turn()
    assert warming.end == PeerMiss.GONE.value and not reader.tiers.busy


def test_a_source_that_dies_ends_the_hand_over_and_what_came_stays(world: World, reader: Engine) -> None:
    lender = world.engine("lender")
    lender.store(key(1), key(2))
    reader.plane.fails = True
    warming = reader.warm(lender)
    finish(world, reader, warming)
    assert warming.end == PeerMiss.GONE.value and reader.cpu.usage.free == 8


def test_a_hand_over_from_a_source_that_restarted_goes_on(world: World, lender: Engine, reader: Engine) -> None:
    reader.fetch(reader.wish(lender), key(1))
    reborn = world.engine("lender")
    reborn.store(key(2), key(3))
    warming = reader.warm(reborn)
    finish(world, reader, warming)
    assert warming.end == WarmEnd.COMPLETE and warming.warmed().fetched == 2


def test_batches_are_as_large_as_before_when_the_source_lends_again(world: World) -> None:
    lender, reader = world.engine("lender", 64), world.engine("reader", 64)
    lender.store(*map(key, range(40)))
    warming = reader.warm(lender)
    # Other readers have borrowed all that the source lends, and then all but one chunk.
    most = lender.lender._max_lent_chunks
    batches: list[int] = []
    for lent, turns in ((0, 6), (1, 6), (most, 30)):
        lender.lender._max_lent_chunks = lent
        for _ in range(turns):
            world.turn()
            if warming.batch is not None:
                batches.append(len(warming.batch.keys))
        world.now_s += TIMEOUT_S
    finish(world, reader, warming)
    assert warming.end == WarmEnd.COMPLETE and warming.warmed().fetched == 40
    assert batches[0] == 40 and min(batches) == 1 and max(batches[batches.index(1) :]) > 8


def test_a_reset_ends_a_hand_over(world: World) -> None:
    lender, reader = divided_worlds(world)
    warming = reader.warm(lender)
    world.turn()
    reader.reset()
    finish(world, reader, warming)
    assert warming.end == PeerMiss.RESETS.value and not reader.announced


def test_a_source_with_other_weights_hands_nothing_over(world: World) -> None:
    lender, reader = divided_worlds(world)
    lender.reset()
    lender.store(key(1))
    warming = reader.warm(lender)
    finish(world, reader, warming)
    assert warming.end == PeerMiss.RESETS.value and not reader.announced


def test_a_stopped_hand_over_keeps_what_came(world: World) -> None:
    lender, reader = divided_worlds(world)
    reader.plane.hangs = True
    warming = reader.warm(lender)
    for _ in range(6):
        world.turn()
    reader.tiers.stop_warming(warming.number)
    for transfer in reader.plane.under_way:
        transfer.hangs = False
    finish(world, reader, warming)
    assert warming.end == WarmEnd.STOPPED and len(reader.announced) == 8


def test_a_transfer_that_never_ends_keeps_no_hand_over_after_its_end(world: World) -> None:
    lender, reader = divided_worlds(world)
    reader.plane.hangs = True
    warming = reader.warm(lender, within_s=TIMEOUT_S)
    for _ in range(6):
        world.turn()
    world.now_s += TIMEOUT_S
    world.turn()
    assert warming.end == WarmEnd.TIME and reader.tiers.advance_warming()
    world.now_s += LOAN_MARGIN_S
    assert not reader.tiers.advance_warming()
    assert warming.warmed().missed == 8 and reader.cpu.usage.writing == 8
    # A chunk that arrives after all is announced, and its slot is used again.
    for transfer in reader.plane.under_way:
        transfer.hangs = False
    world.turn()
    reader.step(PromotionRequest())
    assert len(reader.announced) == 8 and reader.cpu.usage.writing == 0


def test_a_request_waits_for_a_chunk_that_a_hand_over_fetches_no_longer_than_for_its_own(world: World) -> None:
    lender, reader = divided_worlds(world)
    reader.plane.hangs = True
    reader.warm(lender)
    for _ in range(6):
        world.turn()
    wish = PromotionRequest()
    assert reader.step(wish, key(1)) == [SOON]
    world.now_s += TIMEOUT_S
    assert reader.step(wish, key(1)) == [NO]


def test_shares_keep_prompts_together_and_give_shared_beginnings_to_all() -> None:
    before: dict[int, int] = {}
    system = list(range(1, 4))
    prompts = [[*system, *range(100 * n, 100 * n + 10)] for n in range(1, 10)]
    for prompt in prompts:
        before |= dict(zip(prompt[1:], prompt, strict=False))
    keys = [key(block, group) for block in dict.fromkeys(chain(*prompts)) for group in (0, 1)]
    divided = shares(keys, before, 3)
    assert set().union(*divided) == set(keys)
    for share in divided:
        assert {key(block) for block in system} <= set(share)
        whole = [all(key(block, 1) in share and key(block) in share for block in prompt) for prompt in prompts]
        assert sum(whole) == 3
        assert len(share) == 2 * (3 + 3 * 10)
        assert share == [key for key in keys if key in set(share)]


@pytest.mark.parametrize("seed", range(50))
def test_shares_of_any_links_hold_every_key_once_or_in_all(seed: int) -> None:
    rng = random.Random(seed)
    keys = [key(number, rng.randrange(2)) for number in rng.sample(range(1, 60), 40)]
    before = {rng.randrange(1, 60): rng.randrange(1, 60) for _ in range(60)}
    num_shares = rng.randint(1, 5)
    divided = shares(keys, before, num_shares)
    counts = Counter(key for share in divided for key in share)
    assert set(counts) == set(keys) and set(counts.values()) <= {1, num_shares}


def test_two_engines_take_over_a_third_and_no_prompt_is_torn(world: World) -> None:
    lender = world.engine("lender", 32)
    readers = [world.engine(f"reader{n}", 32) for n in range(2)]
    for prompt in range(4):
        lender.store(key(1), key(2), *(key(10 * prompt + n) for n in range(10, 15)))
    warmings = [reader.warm(lender, n, 2) for n, reader in enumerate(readers)]
    for reader, warming in zip(readers, warmings, strict=True):
        finish(world, reader, warming)
    assert readers[0].announced | readers[1].announced == lender.announced
    assert readers[0].announced & readers[1].announced == {key(1), key(2)}
    for prompt in range(4):
        chunks = {key(10 * prompt + n) for n in range(10, 15)}
        assert chunks <= readers[0].announced or chunks <= readers[1].announced
    # The engines that took over know the prompts, too, and hand them on as well.
    last = world.engine("last", 32)
    finish(world, last, last.warm(readers[0], 1, 2))
    assert {key(1), key(2)} <= last.announced and len(last.announced) == 2 + 5


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_content_is_right_requests_end_and_slots_come_back(seed: int) -> None:
    """Three engines read from each other while chunks are evicted, engines reset, restart and hang, and copies fail.

    `Engine.read_changes` checks after each step that every chunk that can be loaded has the content of the engine's own
    weights. At the end everything is undone, and a fetch succeeds. Every other world has disks, from which is lent.
    """
    rng = random.Random(seed)
    world = World()
    disks = dict.fromkeys(("has_disk", "lends_disk"), seed % 2 == 1)
    engines = [world.engine(name, rng.randint(3, 10), **disks) for name in ("a", "b", "c")]
    live: list[Live] = []
    for _ in range(250):
        engine, other = rng.sample(engines, 2)
        event = rng.random()
        if event < 0.1:
            engine.store(*{key(rng.randrange(12)) for _ in range(rng.randint(1, 3))})
        elif event < 0.2:
            timeout_s = rng.choice((0.1, 1.0, 3.0))
            wanted = [key(number) for number in rng.sample(range(12), 4)]
            live.append(Live(engine, engine.wish(other, timeout_s), wanted))
        elif event < 0.7 and live:
            request = rng.choice(live)
            # No deadline ends a wait for the engine's own disk.
            is_own = list(map(request.engine.reads_from_disk, request.wanted))
            answers = request.engine.step(request.wish, *request.wanted)
            assert request.wish.peer is not None
            deadline_s = request.wish.peer.deadline_s
            if deadline_s is not None and deadline_s <= world.now_s:
                from_peer = {answer for answer, own in zip(answers, is_own, strict=True) if not own}
                assert not from_peer & {UNKNOWN, SOON}, "a request waits beyond its deadline"
            if rng.random() < 0.2:
                request.engine.tiers.forget(request.wish)
                live.remove(request)
        elif event < 0.715:
            former = engine.warming
            if former is None or (former.end and former.batch is None):
                engine.warm(other, rng.randrange(2), 2, rng.randint(1, 8), rng.choice((0.5, 5.0)))
        elif event < 0.73:
            for each in engines if rng.random() < 0.8 else [engine]:
                each.reset()
        elif event < 0.75:
            live = [request for request in live if request.engine is not engine]
            engines[engines.index(engine)] = world.engine(engine.name, rng.randint(3, 10), **disks)
        elif event < 0.9:
            fault = rng.choice(("hangs", "damages", "fails", "refuses"))
            setattr(engine.plane, fault, rng.random() < 0.3)
            other.stopped = rng.random() < 0.3
            engine.disk.hangs, engine.disk.fails = other.stopped, fault == "fails"
            for transfer in engine.plane.under_way:
                transfer.hangs = rng.random() < 0.3
        else:
            world.now_s += rng.choice((0.01, 0.3, 3.0))
        world.turn(rng)
        for each in engines:
            each.tiers.end_step()
            each.read_changes()
            usage = each.cpu.usage
            assert usage.free + usage.writing + usage.ready + usage.withheld == usage.num_slots
    for request in live:
        request.engine.tiers.forget(request.wish)
    for engine in engines:
        engine.stopped = False
        engine.plane.hangs = engine.plane.damages = engine.plane.fails = engine.plane.refuses = False
        engine.disk.hangs = engine.disk.fails = False
        for transfer in engine.plane.under_way:
            transfer.hangs = transfer.fails = transfer.damages = False
    for _ in range(4):
        world.now_s += 70.0
        for _ in range(10):
            world.turn()
        for engine in engines:
            engine.tiers.end_step()
            engine.read_changes()
    for engine in engines:
        usage = engine.cpu.usage
        assert usage.writing == usage.withheld == usage.pinned == 0
        assert engine.lender.lent_chunks == 0
        assert not engine.tiers.busy
        warming = engine.warming
        assert warming is None or (warming.end and warming.batch is None)
    first, second, _ = engines
    while first.tiers.num_resets < second.tiers.num_resets:
        first.reset()
    while second.tiers.num_resets < first.tiers.num_resets:
        second.reset()
    first.weights = second.weights = 1_000
    first.tiers.reset()
    second.tiers.reset()
    first.read_changes()
    second.read_changes()
    second.store(key(99))
    first.fetch(first.wish(second), key(99))
    assert first.fetch(first.wish(second), key(99)) == [YES]


# Seconds within which each request is admitted: its own timeout, and that of another request whose chunk it waits for.
ADMITTED_S = 2 * TIMEOUT_S + 1.0
ROUND_S = 0.05


@dataclass
class Job:
    """A request that waits, runs, is preempted and comes again, or ends."""

    engine: Engine
    wish: PromotionRequest
    wanted: list[OffloadKey]
    waits_since_s: float
    loaded: list[OffloadKey] = field(default_factory=list)
    num_resets: int = 0
    is_admitted: bool = False


@pytest.mark.parametrize("seed", range(40))
def test_requests_that_are_preempted_and_come_again_are_admitted_in_time(seed: int) -> None:
    """Requests of three engines look the same chunks up, with and without sources that hang, stand still and are reset."""
    rng = random.Random(seed)
    world = World()
    engines = [world.engine(name, rng.randint(4, 10)) for name in ("a", "b", "c")]
    jobs: list[Job] = []
    num_again = 0
    for _ in range(200):
        world.now_s += ROUND_S
        for engine in engines:
            if sum(job.engine is engine for job in jobs) < 3:
                other = rng.choice([each for each in engines if each is not engine])
                wish = engine.wish(other) if rng.random() < 0.8 else PromotionRequest()
                jobs.append(Job(engine, wish, [key(number) for number in rng.sample(range(12), 4)], world.now_s))
            engine.stopped = rng.random() < 0.1
            engine.plane.hangs = rng.random() < 0.1
            for transfer in engine.plane.under_way:
                transfer.hangs = transfer.hangs and rng.random() < 0.97
        if rng.random() < 0.03:
            for engine in engines:
                engine.reset()
        for job in list(jobs):
            tiers = job.engine.tiers
            if not job.is_admitted:
                answers = [tiers.look_up(key, job.wish) for key in job.wanted]
                if UNKNOWN in answers or SOON in answers:
                    assert world.now_s - job.waits_since_s < ADMITTED_S, (answers, job)
                    continue
                job.loaded = [key for key, answer in zip(job.wanted, answers, strict=True) if answer is YES]
                tiers.begin_load(job.loaded, job.wish)
                job.num_resets, job.is_admitted = tiers.num_resets, True
            elif rng.random() < 0.3:
                if job.num_resets == tiers.num_resets:
                    tiers.end_load(job.loaded)
                if rng.random() < 0.4:
                    # Preempted: the same request waits again.
                    job.is_admitted, job.waits_since_s = False, world.now_s
                    num_again += 1
                    continue
                jobs.remove(job)
                tiers.forget(job.wish)
                job.engine.store(*job.wanted)
        for engine in engines:
            engine.tiers.end_step()
        world.turn(rng)
        for engine in engines:
            engine.read_changes()
    assert num_again > 20
