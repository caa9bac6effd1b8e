# SPDX-License-Identifier: Apache-2.0
"""What one stream means, item by item: counts, epochs, states and reasons. No sockets, no Redis."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.events.vllm.codec import BatchDecoder, encode_batch
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
    ReplayFinished,
    Restarted,
    ResumePoint,
    fingerprint,
)
from kvrouter.events.vllm.wire import WireCleared, WireRemoved, WireStored
from kvrouter.router.common.ids import GPU, Place, WorkerKey
from kvrouter.router.ingest.engine_liveness import EngineAbsent, EnginePresent
from kvrouter.router.ingest.ingest import Ingest
from kvrouter.router.kvcache.block_hash import HashScheme, hash_block, reduce_hash
from kvrouter.router.kvcache.catalog_learner import UNNAMED_BLOCK_TOKENS
from kvrouter.router.workers.registration import CatalogSpec, GroupSpec, Registration
from kvrouter.router.workers.stream_state import StreamState

REPLAY = "tcp://127.0.0.1:2"
G0 = Place(0, GPU)


def make(replay: str | None = REPLAY, catalog: CatalogSpec | None = None) -> Ingest:
    numbers = count()
    registration = Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1", replay=replay, catalog=catalog)
    return Ingest(registration, seed=None, decoder=BatchDecoder(), new_epoch=lambda: f"e{next(numbers)}")


def stored(hashes: list[int], group: int | None = 0, **fields: Any) -> WireStored:
    given: dict[str, Any] = {
        "parent_block_hash": 77, "token_ids": [], "block_size": 16, "lora_id": None, "medium": GPU, "lora_name": None,
        "kv_cache_spec_kind": None if group is None else "full_attention",
    }  # fmt: skip
    return WireStored(block_hashes=hashes, group_idx=group, **(given | fields))


def removed(hashes: list[int], group: int | None = 0, medium: str = GPU) -> WireRemoved:
    return WireRemoved(block_hashes=hashes, medium=medium, group_idx=group)


def batch(seq: int, *events: Any) -> Batch:
    payload = encode_batch(float(seq), list(events))
    return Batch(seq, payload, fingerprint(payload), False)


def feed(ingest: Ingest, *items: Any) -> Ingest:
    for item in items:
        ingest.apply(item, 1.0)
    return ingest


def net(ingest: Ingest) -> dict[str, tuple[list[int], list[int]]]:
    flush = ingest.held.take()
    assert flush is not None
    return {c.place.text: (sorted(c.added.tolist()), sorted(c.removed.tolist())) for c in flush.changes}


def live(**options: Any) -> Ingest:
    ingest = feed(make(**options), Connected(replaying=True), ReplayFinished(None, None, 0))
    assert ingest.state is StreamState.LIVE
    return ingest


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
    flush = ingest.held.take()
    assert flush is not None and flush.copies == [(G0, 1, 2)]
    feed(ingest, batch(1, removed([1])))
    flush = ingest.held.take()
    assert flush is not None and flush.copies == [(G0, 1, 1)]


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
    flush = ingest.held.take()
    assert flush is not None and flush.copies == [(G0, 1, 0)]
    assert {c.place.text: c.removed.tolist() for c in flush.changes} == {"g0:GPU": [1], "g0:CPU": [2]}
    assert ingest.held.blocks.counts() == {"g0:CPU": 0, "g0:GPU": 0}


def test_clearing_one_medium_leaves_the_other() -> None:
    ingest = feed(live(), batch(0, stored([1]), stored([2], medium="CPU")), batch(1, WireCleared(medium="GPU")))
    assert ingest.held.blocks.counts() == {"g0:CPU": 1, "g0:GPU": 0}


def test_a_lost_gap_voids_and_learns_anew() -> None:
    ingest = feed(live(), batch(0, stored([1])))
    before = ingest.held.epoch
    ingest.held.take()
    feed(ingest, GapLost(1, 6, "no replay endpoint"), batch(6, stored([9])))
    flush = ingest.held.take()
    assert flush is not None and flush.opens_epoch and flush.epoch != before and flush.seqs == (6, 6)
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}
    assert ingest.state is StreamState.LIVE and "1 to 5 are lost" in ingest.reason and ingest.profile.tally.gaps == 1


def test_an_open_gap_withdraws_credit_and_a_closed_one_gives_it_back() -> None:
    ingest = feed(live(), batch(0, stored([1])), GapOpened(1, 3))
    assert ingest.state is StreamState.RESYNCING
    feed(ingest, batch(1), batch(2), GapClosed(1, 3), batch(3))
    assert ingest.state is StreamState.LIVE and ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_a_restart_voids_before_its_first_batch() -> None:
    ingest = feed(live(), batch(0, stored([1])))
    ingest.held.take()
    feed(ingest, Restarted(0, 0, "seq fell back"))
    assert ingest.held.blocks.counts() == {} and ingest.profile.tally.restarts == 1
    flush = ingest.held.take()
    assert flush is not None and flush.opens_epoch and flush.seqs is None


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


def test_restored_is_suspect_until_proven_and_credited_meanwhile() -> None:
    ingest = make()
    ingest.restore("old", 41, {G0: np.array([1, 2], np.uint64)}, {(G0, 2): 2}, {})
    assert (
        ingest.state is StreamState.SUSPECT and ingest.resume_point == ResumePoint(41, 0) and not ingest.held.has_news
    )
    feed(ingest, Connected())
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, Proven(41, "replay"), batch(42, removed([1, 2])))
    assert ingest.state is StreamState.LIVE
    assert net(ingest) == {"g0:GPU": ([], [1])}


def test_restored_and_disproven_is_void() -> None:
    ingest = make()
    ingest.restore("old", 41, {G0: np.array([1], np.uint64)}, {}, {})
    feed(ingest, Connected(), Restarted(41, 3, "another batch 41"), batch(3, stored([7])))
    flush = ingest.held.take()
    assert flush is not None and flush.opens_epoch and ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_what_was_learned_survives_a_restore() -> None:
    first = feed(
        live(),
        batch(0, stored([1]), stored([2], 1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64)),
    )
    flush = first.held.take()
    assert flush is not None
    second = make()
    second.restore(flush.epoch, 0, {}, {}, flush.meta)
    assert second.profile.catalog.groups == first.profile.catalog.groups and second.resume_point == first.resume_point


def test_a_lost_connection_is_suspect() -> None:
    ingest = feed(live(), batch(0, stored([1])), Disconnected())
    assert ingest.state is StreamState.SUSPECT and "lost" in ingest.reason
    feed(ingest, Connected())
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, Proven(0, "replay"))
    assert ingest.state is StreamState.LIVE


def test_a_replay_that_fails_leaves_a_fresh_worker_live_and_says_so() -> None:
    ingest = feed(make(), Connected(replaying=True))
    assert ingest.state is StreamState.CATCHING_UP
    feed(ingest, ReplayFailed("no answer within 5 s"))
    assert ingest.state is StreamState.LIVE and "no answer" in ingest.reason


def test_malformed_messages_are_counted() -> None:
    assert feed(live(), Malformed("2 frames")).profile.tally.malformed == 1


TOKENS = list(range(100, 116))


def root(scheme: HashScheme, **fields: Any) -> WireStored:
    block_hash = reduce_hash(hash_block(scheme, None, TOKENS, None))
    return stored([block_hash], parent_block_hash=None, token_ids=TOKENS, extra_keys=[None], **fields)


@pytest.mark.parametrize("scheme", [HashScheme.default("sha256_cbor"), HashScheme.from_seed("xxhash", "0")])
def test_the_first_root_block_verifies_the_scheme(scheme: HashScheme) -> None:
    ingest = live()
    assert ingest.profile.identity.label.endswith("(assumed)") and ingest.profile.identity.wants_tokens
    feed(ingest, batch(0, root(scheme)))
    assert ingest.profile.identity.scheme == scheme and ingest.profile.identity.label.endswith("(verified)")
    assert not ingest.profile.identity.wants_tokens


def test_a_scheme_that_nothing_explains_is_unhashable_until_a_block_verifies() -> None:
    ingest = feed(live(), batch(0, root(HashScheme.from_seed("sha256", "nobody knows"))))
    assert ingest.state is StreamState.UNHASHABLE and "none_hash_seed" in ingest.reason
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}
    feed(ingest, batch(1, root(HashScheme.default())))
    assert ingest.state is StreamState.LIVE


def test_a_removal_first_makes_the_catalog_incomplete() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, removed([4], 3)))
    assert ingest.profile.catalog.problem is not None and "group 3" in ingest.profile.catalog.problem
    feed(ingest, batch(2, stored([], 3, kv_cache_spec_kind="mamba")))
    assert ingest.profile.catalog.problem is None and len(ingest.profile.catalog.groups) == 2


def test_a_group_that_contradicts_itself_makes_the_catalog_incomplete() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, stored([2], kv_cache_spec_kind="mamba")))
    assert ingest.profile.catalog.problem is not None and "contradicts itself" in ingest.profile.catalog.problem


def placeholder(block_hash: int) -> WireStored:
    return stored([block_hash], medium="CPU", block_size=0, parent_block_hash=None, kv_cache_spec_kind=None)


def test_a_first_block_alone_on_the_cpu_tier_shows_that_chunks_are_single_blocks() -> None:
    ingest = feed(live(), batch(0, stored([1, 2, 3], parent_block_hash=None)), batch(1, placeholder(2)))
    assert ingest.profile.catalog.blocks_per_chunk is None and "offload_blocks_per_chunk" in ingest.reason
    feed(ingest, batch(2, placeholder(1)))
    assert ingest.profile.catalog.blocks_per_chunk == 1 and ingest.reason == ""


def test_a_self_describing_store_tells_the_chunk_size() -> None:
    ingest = feed(
        live(), batch(0, stored([1, 2, 3, 4], parent_block_hash=None)), batch(1, stored([1, 2], medium="CPU"))
    )
    assert ingest.profile.catalog.blocks_per_chunk == 2


def test_what_is_stated_wins_over_what_is_learned() -> None:
    spec = CatalogSpec(groups=(GroupSpec(0, "full_attention", 16, eagle=True),))
    ingest = feed(live(catalog=spec), batch(0, stored([1], kv_cache_spec_kind="mamba")))
    assert ingest.profile.catalog.source == "configured" and ingest.profile.catalog.groups[0].eagle
    feed(ingest, batch(1, stored([1], 1)))
    assert ingest.profile.catalog.source == "learned" and len(ingest.profile.catalog.groups) == 2


def ranked(seq: int, rank: int | None, *events: Any) -> Batch:
    payload = encode_batch(float(seq), list(events), rank)
    return Batch(seq, payload, fingerprint(payload), False)


def test_batches_of_another_rank_are_never_credited() -> None:
    ingest = live()
    ingest.allow_ranks(frozenset({1}))
    feed(ingest, ranked(0, 1, stored([1, 2])))
    assert ingest.held.blocks.counts() == {"g0:GPU": 2}
    epoch = ingest.held.epoch
    feed(ingest, ranked(1, 0, stored([3])))
    assert ingest.state is StreamState.MISMATCHED and "publishes rank 0" in ingest.reason
    assert ingest.held.epoch != epoch and not ingest.held.blocks.counts(), (
        "what came before may have been another's too"
    )
    # A batch that names no rank is of the one before.
    feed(ingest, ranked(2, None, stored([4])), ranked(3, 0, stored([5])))
    assert not ingest.held.blocks.counts() and ingest.profile.tally.foreign == 3
    feed(ingest, ranked(4, 1, stored([6])))
    assert ingest.state is StreamState.LIVE and ingest.reason == ""
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_a_rank_that_the_engine_names_later_has_its_stream_read_anew() -> None:
    ingest = live()
    ingest.allow_ranks(frozenset({0}))
    feed(ingest, ranked(0, 4, stored([1])))
    assert ingest.state is StreamState.MISMATCHED
    assert ingest.allow_ranks(frozenset({0, 4})), "what was left out is wanted"
    assert ingest.state is StreamState.LIVE
    assert not live().allow_ranks(frozenset({0}))


def test_the_rank_of_a_stream_is_remembered_over_a_restart() -> None:
    ingest = live()
    ingest.allow_ranks(frozenset({1}))
    feed(ingest, ranked(0, 0, stored([1])))
    flush = ingest.held.take()
    assert flush is not None
    again = make()
    again.allow_ranks(frozenset({1}))
    again.restore(flush.epoch, 0, {}, {}, flush.meta)
    assert again.state is StreamState.MISMATCHED and "publishes rank 0" in again.reason
    assert again.allow_ranks(frozenset({0})), "what was left out is wanted"
    # Another life may have another rank.
    again.allow_ranks(frozenset({1}))
    feed(again, Connected(), Restarted(0, 0, "seq 0 again", True))
    assert again.state is StreamState.CATCHING_UP


def test_what_happened_to_a_live_worker_hides_nothing_for_good() -> None:
    ingest = feed(make(replay=None), Connected(), batch(0, stored([1]), placeholder(2)))
    assert ingest.state is not StreamState.CONNECTING and "no replay endpoint" in ingest.reason
    ingest.profile.forget_incident()
    assert "chunk size of the offload tier" in ingest.reason
    doubted = feed(make(), Connected(replaying=True))
    assert doubted.reason
    doubted.profile.forget_incident()
    # It is why it is not live.
    assert "replaying" in doubted.reason


def test_an_engine_that_is_not_up_is_down_until_its_stream_or_its_url_shows_it() -> None:
    ingest = make()
    ingest.on_liveness(EngineAbsent("http://x cannot be reached: Connection refused"))
    assert ingest.state is StreamState.DOWN and "not up" in ingest.reason and "Connection refused" in ingest.reason
    ingest.on_liveness(EnginePresent())
    assert ingest.state is StreamState.CONNECTING
    ingest.on_liveness(EngineAbsent("refused"))
    # Its URL may be one that this router cannot reach; events prove that it lives.
    feed(ingest, Connected(), batch(0, stored([1])))
    assert ingest.state is StreamState.LIVE and "not up" not in ingest.reason


def entry(block_hash: int, parent: int | None, group: int, kind: str) -> WireStored:
    """One block, or one entry inside a larger one: both come so."""
    return stored([block_hash], group, parent_block_hash=parent, kv_cache_spec_kind=kind)


def partial(seq: int = 0) -> Any:
    # Hash 3 ends at 48 tokens; nobody stored 2, at 32, whose block it would follow.
    return batch(seq, entry(3, 2, 0, "full_attention"), entry(3, 2, 1, "mamba"))


def test_a_group_known_from_entries_inside_its_blocks_alone_has_larger_blocks() -> None:
    ingest = feed(live(), partial())
    assert ingest.profile.catalog.problem is None and ingest.profile.catalog.partial_hits
    assert [group.block_size for group in ingest.profile.catalog.groups] == [UNNAMED_BLOCK_TOKENS, 16]
    flush = ingest.held.take()
    assert flush is not None
    again = make()
    again.restore(flush.epoch, 0, {}, {}, flush.meta)
    assert again.profile.catalog == ingest.profile.catalog, "a router that takes over knows it too"
    feed(ingest, batch(1, stored([9], 0, block_size=528), entry(12, 11, 1, "mamba")))
    assert ingest.profile.catalog.groups[0].block_size == 528 and ingest.profile.catalog.partial_hits


@pytest.mark.parametrize(
    "events",
    [
        [],
        [stored([1, 2, 5])],
        [entry(1, None, 0, "full_attention"), entry(2, 1, 0, "full_attention")],
    ],
    ids=["what came before is not known", "several at a time", "each after its parent"],
)
def test_blocks_that_may_be_whole_are_taken_for_whole(events: list[Any]) -> None:
    ingest = feed(live(), *([batch(0, *events)] if events else []), partial(1))
    catalog = ingest.profile.catalog
    assert [group.block_size for group in catalog.groups] == [16, 16] and not catalog.partial_hits


def test_after_an_event_that_cannot_be_read_blocks_are_taken_for_whole() -> None:
    ingest = live()
    broken = Batch(0, msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": "?"}]]), 0, False)
    feed(ingest, broken, partial(1))
    assert ingest.profile.tally.broken == 1
    assert [group.block_size for group in ingest.profile.catalog.groups] == [16, 16]
