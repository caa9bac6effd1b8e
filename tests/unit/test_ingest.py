# SPDX-License-Identifier: Apache-2.0
"""Meaning of one stream, item by item: counts, epochs, states and reasons, without sockets or Redis."""

from __future__ import annotations

import numpy as np

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapClosed,
    GapLost,
    GapOpened,
    Malformed,
    Proven,
    ReplayFailed,
    Restarted,
    ResumePoint,
)
from kvrouter.events.vllm.wire import WireCleared
from kvrouter.router.base.common.ids import GPU, Place
from kvrouter.router.index.ingest.engine_liveness import EngineAbsent, EnginePresent
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.ingest_steps import batch, feed, live, make, removed, restored, stored, taken

G0 = Place(0, GPU)


def net(ingest: Ingest) -> dict[str, tuple[list[int], list[int]]]:
    return {c.place.text: (sorted(c.added.tolist()), sorted(c.removed.tolist())) for c in taken(ingest).changes}


def test_stored_twice_removed_once_is_still_there() -> None:
    ingest = feed(live(), batch(0, stored([1, 2]), stored([1])), batch(1, removed([1, 2])))
    assert net(ingest) == {"g0:GPU": ([1], [])}
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_a_block_that_came_and_went_between_flushes_is_no_change() -> None:
    ingest = feed(live(), batch(0, stored([1, 2])))
    assert net(ingest) == {"g0:GPU": ([1, 2], [])}
    feed(ingest, batch(1, stored([3]), removed([3]), removed([1])), batch(2, stored([1])))
    assert net(ingest) == {}


def test_copies_are_reported_from_two_on_and_when_they_fall_below() -> None:
    ingest = feed(live(), batch(0, stored([1, 2]), stored([1])))
    assert taken(ingest).copies == [(G0, 1, 2)]
    feed(ingest, batch(1, removed([1])))
    assert taken(ingest).copies == [(G0, 1, 1)]


def test_a_removal_of_what_was_never_stored_changes_nothing() -> None:
    ingest = feed(live(), batch(0, removed([5])), batch(1, stored([5])))
    assert net(ingest) == {"g0:GPU": ([5], [])}


def test_groups_media_and_owners_are_kept_apart() -> None:
    ingest = feed(
        live(),
        batch(0, stored([1]), stored([1], 1), stored([1], medium="CPU"), stored([1], medium="storage", ownership="fs")),
        batch(1, removed([1], 1)),
    )
    assert ingest.held.blocks.counts() == {"g0:CPU": 1, "g0:GPU": 1, "g0:STORAGE:fs": 1, "g1:GPU": 0}


def test_the_unnamed_group_is_never_group_0() -> None:
    ingest = feed(live(), batch(0, stored([1], None)), batch(1, stored([1], 0)), batch(2, removed([1], None)))
    assert ingest.held.blocks.counts() == {"g-:GPU": 0, "g0:GPU": 1}
    assert ingest.profile.catalog.problem is not None and "group_idx" in ingest.profile.catalog.problem


def test_clearing_drops_every_medium_and_the_stored_copies() -> None:
    ingest = feed(live(), batch(0, stored([1]), stored([1]), stored([2], medium="CPU")))
    ingest.held.take()
    feed(ingest, batch(1, WireCleared()))
    flush = taken(ingest)
    assert flush.copies == [(G0, 1, 0)]
    assert {c.place.text: c.removed.tolist() for c in flush.changes} == {"g0:GPU": [1], "g0:CPU": [2]}
    assert ingest.held.blocks.counts() == {"g0:CPU": 0, "g0:GPU": 0}


def test_clearing_one_medium_leaves_the_other() -> None:
    ingest = feed(live(), batch(0, stored([1]), stored([2], medium="CPU")), batch(1, WireCleared(medium="GPU")))
    assert ingest.held.blocks.counts() == {"g0:CPU": 1, "g0:GPU": 0}


def test_a_lost_gap_voids_and_learns_again() -> None:
    ingest = feed(live(), batch(0, stored([1])))
    epoch_before = ingest.held.epoch
    ingest.held.take()
    feed(ingest, GapLost(1, 6, "no replay endpoint"), batch(6, stored([9])))
    flush = taken(ingest)
    assert flush.opens_epoch and flush.epoch != epoch_before and flush.seqs == (6, 6)
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}
    assert ingest.state is StreamState.LIVE and "1 to 5 are lost" in ingest.reason and ingest.profile.tally.gaps == 1


def test_an_open_gap_withdraws_credit_and_a_closed_one_gives_it_back() -> None:
    ingest = feed(live(), batch(0, stored([1])), GapOpened(1, 3), FellBehind())
    assert ingest.state is StreamState.RESYNCING
    feed(ingest, batch(1), batch(2), GapClosed(1, 3), batch(3))
    assert ingest.state is StreamState.RESYNCING, "a removal may still be held behind the replay"
    feed(ingest, CaughtUp())
    assert ingest.state is StreamState.LIVE and not ingest.reason and ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_a_restart_voids_before_its_first_batch() -> None:
    ingest = feed(live(), batch(0, stored([1])))
    ingest.held.take()
    feed(ingest, Restarted(0, 0, "seq fell back"))
    assert ingest.held.blocks.counts() == {} and ingest.profile.tally.restarts == 1
    flush = taken(ingest)
    assert flush.opens_epoch and flush.seqs is None


def test_an_unreadable_removal_voids_and_an_unreadable_store_does_not() -> None:
    good = stored([1])
    ingest = feed(live(), batch(0, good))
    feed(ingest, batch(1, {"type": "BlockStored", "block_hashes": "x"}, stored([2])))
    assert ingest.held.blocks.counts() == {"g0:GPU": 2} and ingest.profile.tally.broken == 1
    feed(ingest, batch(2, {"type": "BlockRemoved", "block_hashes": "x"}, stored([3])))
    assert (
        ingest.held.blocks.counts() == {}
        and "could not be decoded" in ingest.reason
        and ingest.profile.tally.broken == 2
    )


def test_an_unknown_event_costs_only_itself() -> None:
    ingest = feed(live(), batch(0, {"type": "BlockPinned", "x": 1}, stored([2])))
    assert (
        ingest.held.blocks.counts() == {"g0:GPU": 1}
        and ingest.profile.tally.unknown == 1
        and ingest.state is StreamState.LIVE
    )


def test_a_payload_that_is_no_batch_voids() -> None:
    ingest = feed(live(), batch(0, stored([1])), Batch(1, b"\xc1", 5, False))
    assert ingest.held.blocks.counts() == {} and "could not be decoded" in ingest.reason


def test_a_restored_worker_is_suspect_and_credited_until_proven() -> None:
    ingest = make()
    ingest.restore("old", 41, {G0: np.array([1, 2], np.uint64)}, {(G0, 2): 2}, {})
    assert (
        ingest.state is StreamState.SUSPECT and ingest.resume_point == ResumePoint(41, 0) and not ingest.held.has_news
    )
    feed(ingest, FellBehind(), Connected())
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, Proven(41, "replay"))
    assert ingest.state is StreamState.SUSPECT, "the removals come with the rest of the replay"
    feed(ingest, batch(42, removed([1, 2])))
    assert ingest.state is StreamState.SUSPECT and "after batch 41" in ingest.reason
    feed(ingest, CaughtUp())
    assert ingest.state is StreamState.LIVE and not ingest.reason
    assert net(ingest) == {"g0:GPU": ([], [1])}


def test_a_disproven_restored_state_is_void() -> None:
    ingest = make()
    ingest.restore("old", 41, {G0: np.array([1], np.uint64)}, {}, {})
    feed(ingest, Connected(), Restarted(41, 3, "another batch 41"), batch(3, stored([7])))
    assert taken(ingest).opens_epoch and ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_the_learned_catalog_survives_a_restore() -> None:
    first = feed(
        live(),
        batch(0, stored([1]), stored([2], 1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64)),
    )
    second = restored(first)
    assert second.profile.catalog.groups == first.profile.catalog.groups and second.resume_point == first.resume_point


def test_a_lost_connection_is_suspect() -> None:
    ingest = feed(live(), batch(0, stored([1])), Disconnected())
    assert ingest.state is StreamState.SUSPECT and "lost" in ingest.reason
    feed(ingest, FellBehind(), Connected())
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, Proven(0, "replay"), CaughtUp())
    assert ingest.state is StreamState.LIVE


def test_a_connection_lost_in_the_middle_of_a_replay_proves_nothing() -> None:
    ingest = feed(live(), batch(0, stored([1])), Disconnected(), FellBehind(), Connected(), Proven(0, "replay"))
    feed(ingest, Disconnected(), Connected(), CaughtUp())
    assert ingest.state is StreamState.SUSPECT


def test_a_connection_lost_with_a_gap_open_gives_no_credit_back() -> None:
    ingest = feed(live(), batch(0, stored([1])), GapOpened(1, 3), FellBehind(), Disconnected())
    assert ingest.state is StreamState.RESYNCING and "1 to 2 are missing" in ingest.reason
    ingest.pause("followed again in a moment")
    assert ingest.state is StreamState.RESYNCING
    feed(ingest, FellBehind(), Connected(), Proven(0, "replay"), batch(1), batch(2))
    assert ingest.state is StreamState.RESYNCING
    feed(ingest, CaughtUp())
    assert ingest.state is StreamState.LIVE


def test_a_check_whose_answer_has_a_hole_withdraws_credit_until_it_has_read_all() -> None:
    ingest = feed(live(), batch(0, stored([1])), FellBehind(missing=True), batch(1))
    assert ingest.state is StreamState.RESYNCING
    feed(ingest, batch(2, removed([1])), CaughtUp())
    assert ingest.state is StreamState.LIVE and ingest.held.blocks.blocks == 0


def test_a_replay_that_fails_leaves_a_fresh_worker_live_and_says_so() -> None:
    ingest = feed(make(), FellBehind(), Connected())
    assert ingest.state is StreamState.CATCHING_UP
    feed(ingest, ReplayFailed("no answer within 5 s"), CaughtUp())
    assert ingest.state is StreamState.LIVE and "no answer" in ingest.reason


def test_malformed_messages_are_counted() -> None:
    assert feed(live(), Malformed("2 frames")).profile.tally.malformed == 1


def test_an_engine_that_is_not_up_is_down_until_its_stream_or_its_url_shows_it() -> None:
    ingest = make()
    ingest.on_liveness(EngineAbsent("http://x cannot be reached: Connection refused"))
    assert ingest.state is StreamState.DOWN and "not up" in ingest.reason and "Connection refused" in ingest.reason
    ingest.on_liveness(EnginePresent())
    assert ingest.state is StreamState.CONNECTING
    ingest.on_liveness(EngineAbsent("refused"))
    # This router may not reach the engine's URL, but events prove that the engine lives.
    feed(ingest, Connected(), batch(0, stored([1])))
    assert ingest.state is StreamState.LIVE and "not up" not in ingest.reason
