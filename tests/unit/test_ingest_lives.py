# SPDX-License-Identifier: Apache-2.0
"""Lives of an engine: a new life keeps nothing of the old one, proofs that a life goes on, and traces of odd events."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.events.patch.items import Declared, Expired, Greeted, Loaded, NewEpoch, ReportBatch, Snapshot
from kvrouter.events.patch.messages import DeclaredCatalog, DeclaredGroup, Events, Hello, ReportStored, pack_hashes
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapLost,
    Incomplete,
    Proven,
    Restarted,
    ResumePoint,
    RingReread,
    fingerprint,
)
from kvrouter.events.vllm.wire import WireStored
from kvrouter.router.base.common.ids import CPU, GPU, Place
from kvrouter.router.index.ingest.engine_liveness import EngineLost, EngineRestarted, EngineSame
from kvrouter.router.index.ingest.stock_feed import SAME_PROCESS_WAIT_S
from kvrouter.router.index.ingest.worker_profile import META_LEARNED, META_SCHEME
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_block, reduce_hash
from kvrouter.router.model.kvcache.catalog_learner import ODD_EVENTS_FORGOTTEN_AFTER
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.ingest_steps import batch, feed, live, make, removed, restored, stored, taken

URL = "http://127.0.0.1:3"
TOKENS = list(range(100, 132))
CBOR, PICKLED = HashScheme.default("sha256_cbor"), HashScheme.default()


def root(scheme: HashScheme, size: int) -> WireStored:
    """Return the event of a prompt's first block, as an engine with blocks of `size` tokens announces it."""
    tokens = TOKENS[:size]
    block_hash = reduce_hash(hash_block(scheme, None, tokens, None))
    return stored([block_hash], parent_block_hash=None, token_ids=tokens, block_size=size, extra_keys=[None])


def test_a_restart_forgets_when_the_last_event_came() -> None:
    ingest = feed(make(url=URL), Connected(), batch(0, stored([1])))
    assert ingest.profile.contact.last_event_s is not None
    ingest.on_liveness(EngineRestarted("its start is 2.00"))
    assert ingest.profile.contact.last_event_s is None
    feed(ingest, Restarted(0, 0, "seq 0"), batch(0, stored([2])), now=3.0)
    assert ingest.profile.contact.last_event_s == 3.0


# -- a new life begins with nothing learned


@pytest.mark.parametrize(
    "end",
    [
        [Restarted(1, 0, "seq fell back")],
        [GapLost(1, 5, "no replay to ask")],
        [RingReread()],
        [EngineRestarted("another start"), Restarted(1, 0, "another start")],
        [EngineLost("refused")],
    ],
    ids=lambda end: type(end[0]).__name__,
)
def test_another_layout_and_hash_scheme_are_learned_from_nothing(end: list[Any]) -> None:
    ingest = feed(live(url=URL), batch(0, root(CBOR, 16), stored([5], 1, kv_cache_spec_kind="mamba")))
    assert ingest.profile.identity.scheme == CBOR and len(ingest.profile.catalog.groups) == 2
    taken(ingest)
    for sign in end:
        ingest.on_liveness(sign) if isinstance(sign, EngineRestarted | EngineLost) else feed(ingest, sign)
    feed(ingest, batch(5, root(PICKLED, 32)))
    catalog = ingest.profile.catalog
    assert catalog.problem is None and [(g.group_idx, g.block_size) for g in catalog.groups] == [(0, 32)]
    assert (ingest.profile.identity.scheme, ingest.profile.identity.standing) == (PICKLED, SchemeState.VERIFIED)
    # Other routers read the scheme and the catalog from Redis.
    flush, other = taken(ingest), make()
    assert flush.opens_epoch
    other.restore(flush.epoch, 5, {}, {}, flush.meta)
    assert other.profile.catalog.groups == catalog.groups and other.profile.identity.scheme == PICKLED
    assert {META_LEARNED, META_SCHEME} <= flush.meta.keys()


def raw(seq: int, *events: Any, rank: int | None = None) -> Batch:
    payload = msgspec.msgpack.encode([float(seq), list(events), rank])
    return Batch(seq, payload, fingerprint(payload), False)


UNREADABLE = {
    "no batch": Batch(5, b"\xc1", fingerprint(b"\xc1"), False),
    "a removal": raw(5, ["BlockRemoved", "nonsense"]),
    "another rank": raw(5, rank=7),
}


@pytest.mark.parametrize("odd", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_voiding_an_unproven_epoch_forgets_the_learned_catalog(odd: Batch) -> None:
    """Void an unproven epoch by a batch that cannot be read.

    The next seq follows after a start of the router, and the engine's HTTP has not yet said whether its process is the
    same. The unreadable batch voids the blocks, so no proof is awaited, and the engine may be another one.
    """
    before = feed(live(url=URL), batch(4, root(CBOR, 16), stored([5], 1, kv_cache_spec_kind="mamba")))
    ingest = restored(before, 4, url=URL)
    ingest.allow_ranks(frozenset({0}))
    feed(ingest, Connected(), Proven(4, "next_seq"))
    assert ingest.state is StreamState.SUSPECT and ingest.profile.identity.scheme == CBOR
    payload = encode_batch(6.0, [root(PICKLED, 32)], 0)
    feed(ingest, odd, Batch(6, payload, fingerprint(payload), False))
    catalog = ingest.profile.catalog
    assert catalog.problem is None and [(group.group_idx, group.block_size) for group in catalog.groups] == [(0, 32)]
    assert (ingest.profile.identity.scheme, ingest.profile.identity.standing) == (PICKLED, SchemeState.VERIFIED)
    assert ingest.state is StreamState.LIVE


def test_a_connection_that_is_heard_of_late_does_not_hide_the_wait_for_the_engines_http() -> None:
    before = feed(live(url=URL), batch(4, root(CBOR, 16)))
    ingest = restored(before, 4, url=URL)
    feed(ingest, Proven(4, "next_seq"), batch(5, stored([5])), Connected())
    assert ingest.state is StreamState.SUSPECT and "HTTP" in ingest.reason


def test_voiding_an_epoch_of_a_proven_engine_keeps_the_learned_catalog() -> None:
    for odd in UNREADABLE.values():
        ingest = feed(live(url=URL), batch(4, root(CBOR, 16), stored([5], 1, kv_cache_spec_kind="mamba")))
        ingest.allow_ranks(frozenset({0}))
        epoch_before = ingest.held.epoch
        feed(ingest, odd)
        assert ingest.held.epoch != epoch_before and not any(ingest.held.blocks.counts().values())
        assert ingest.profile.identity.scheme == CBOR and len(ingest.profile.catalog.groups) == 2


def test_a_stated_catalog_survives_a_restart() -> None:
    spec = CatalogSpec(groups=(GroupSpec(0, "full_attention", 16),), hash_algo="sha256_cbor")
    ingest = feed(live(catalog=spec), batch(0, stored([1])), Restarted(0, 0, "seq fell back"))
    assert [g.block_size for g in ingest.profile.catalog.groups] == [
        16
    ] and ingest.profile.catalog.source == "configured"
    assert ingest.profile.identity.scheme == CBOR


def declared(size: int) -> Declared:
    return Declared(1, DeclaredCatalog([DeclaredGroup(0, "full_attention", size)], hash_block_size=size))


def snapshot(epoch: str, next_seq: int) -> Loaded:
    return Loaded(Snapshot(epoch, 1.0, next_seq, [], []))


def hello(epoch: str) -> Greeted:
    return Greeted(Hello(1, epoch, 1.0, 0, "tcp://127.0.0.1:3", 1.0))


def test_a_new_epoch_of_the_patch_declares_again() -> None:
    ingest = make(url=URL)
    ingest.follow_reports()
    feed(ingest, hello("a"), declared(16), Connected(), snapshot("a", 4))
    assert [g.block_size for g in ingest.profile.catalog.groups] == [16]
    feed(ingest, NewEpoch("b", 2.0, "another life answers"))
    assert ingest.profile.catalog.problem is not None
    feed(ingest, declared(32), snapshot("b", 0))
    assert [g.block_size for g in ingest.profile.catalog.groups] == [32] and ingest.profile.catalog.problem is None


def test_a_declared_catalog_replaces_the_learned_one() -> None:
    ingest = feed(live(), batch(0, stored([1]), stored([2], 1, kv_cache_spec_kind="mamba")))
    ingest.pause("followed again in a moment")
    ingest.follow_reports()
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, hello("a"), declared(16), Connected(), snapshot("a", 4))
    assert [g.group_idx for g in ingest.profile.catalog.groups] == [0] and ingest.state is StreamState.LIVE


def test_late_items_of_an_ended_process_are_ignored() -> None:
    ingest = feed(live(url=URL), batch(0, stored([1])))
    ingest.on_liveness(EngineRestarted("another start"))
    feed(ingest, batch(1, stored([2])))
    assert ingest.held.blocks.blocks == 0 and ingest.state is StreamState.CONNECTING
    feed(ingest, Restarted(0, 1, "another start"), batch(0, stored([3])))
    assert ingest.held.blocks.counts() == {"g0:GPU": 1} and ingest.state is StreamState.LIVE
    reports = make(url=URL)
    reports.follow_reports()
    feed(reports, hello("a"), Connected(), snapshot("a", 1))
    reports.on_liveness(EngineRestarted("another start"))
    late = ReportBatch(1, Events("a", 1.0, 1.0, [ReportStored(pack_hashes([9]), 0, GPU, 16)]))
    feed(reports, late, snapshot("a", 1))
    assert reports.state is StreamState.RESYNCING and reports.held.blocks.blocks == 0
    feed(reports, Expired(), snapshot("b", 1))
    assert reports.state is StreamState.LIVE


# -- what proves that a life goes on


def test_a_connection_lost_before_the_first_batch_leaves_nothing_to_prove() -> None:
    cursor, ingest = Cursor(replay=True), make()
    for step in (cursor.connected, cursor.disconnected, cursor.connected, cursor.replay_ended):
        step()
    feed(ingest, *cursor.take(), batch(0, stored([1])))
    assert ingest.state is StreamState.LIVE


def test_a_replay_that_ends_before_the_news_of_the_connection_leaves_nothing_to_wait_for() -> None:
    cursor, ingest = Cursor(replay=True), make()
    cursor.live(0, batch(0, stored([1])).payload)
    cursor.replayed(0, batch(0, stored([1])).payload)
    cursor.replay_ended()
    cursor.connected()
    assert feed(ingest, *cursor.take()).state is StreamState.LIVE


def test_the_next_seq_alone_is_no_proof() -> None:
    ingest = feed(live(replay=None), batch(0, stored([1])), Disconnected(), Connected(), Proven(0, "next_seq"))
    assert ingest.held.blocks.blocks == 0 and "cannot be proven" in ingest.reason
    feed(ingest, batch(1, stored([2])))
    assert ingest.state is StreamState.LIVE and ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_the_next_seq_and_the_same_process_are_a_proof() -> None:
    ingest = feed(live(replay=None, url=URL), batch(0, stored([1])))
    ingest.on_liveness(EngineSame(1.0, 5.0))
    feed(ingest, batch(1, stored([2])), Disconnected(), Connected(), Proven(1, "next_seq"), batch(2), now=3.0)
    assert ingest.state is StreamState.SUSPECT
    ingest.on_liveness(EngineSame(2.0, 5.0))
    assert ingest.state is StreamState.SUSPECT
    ingest.on_liveness(EngineSame(4.0, 5.0))
    assert ingest.state is StreamState.LIVE and ingest.held.blocks.counts() == {"g0:GPU": 2}


def test_a_process_that_was_not_known_before_is_no_proof_and_neither_is_silence() -> None:
    ingest = feed(live(replay=None, url=URL), batch(0, stored([1])))
    feed(ingest, Disconnected(), Connected(), Proven(0, "next_seq"), batch(1, stored([2])), now=3.0)
    ingest.on_liveness(EngineSame(4.0, 5.0))
    assert ingest.held.blocks.blocks == 0 and "not known before" in ingest.reason
    ingest = feed(live(replay=None, url=URL), batch(0, stored([1])))
    feed(ingest, Disconnected(), Connected(), Proven(0, "next_seq"), batch(1, stored([2])), now=3.0)
    feed(ingest, batch(2, stored([3])), now=4.0 + SAME_PROCESS_WAIT_S)
    assert ingest.held.blocks.counts() == {"g0:GPU": 1} and ingest.state is StreamState.LIVE


def test_the_process_and_missing_replays_are_restored() -> None:
    ingest = feed(live(url=URL), batch(0, stored([1])), GapLost(1, 2, "no answer"), Incomplete(), batch(2, stored([2])))
    ingest.on_liveness(EngineSame(1.0, 5.0))
    feed(ingest, batch(3, stored([3])))
    other = restored(ingest, 3, {Place(0, GPU): np.array([2, 3], np.uint64)}, replay=None, url=URL)
    assert other.resume_point == ResumePoint(3, batch(3, stored([3])).fingerprint, incomplete=True)
    feed(other, Connected(), Proven(3, "next_seq"), batch(4), now=3.0)
    other.on_liveness(EngineSame(4.0, 5.0))
    assert other.state is StreamState.LIVE and other.held.blocks.counts() == {"g0:GPU": 2}


@pytest.mark.parametrize(
    "meta",
    [{"fingerprint": b"-1"}, {"fingerprint": b"9" * 40}, {"gaps": b"x"}, {"process_start": b""}, {"learned": b"["}],
    ids=lambda meta: next(iter(meta)),
)
def test_invalid_stored_fields_are_refused_by_name(meta: dict[str, bytes]) -> None:
    with pytest.raises(ValueError) as raised:
        make().restore("e", 1, {}, {}, meta)
    ingest = make()
    ingest.begin_unreadable(str(raised.value))
    assert "cannot be read" in ingest.reason


# -- odd events


def test_a_removal_of_a_group_that_nothing_else_speaks_of_is_forgotten_in_time_and_a_restore_keeps_it() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, removed([4], 3)))
    assert ingest.profile.catalog.problem is not None
    for subject in (ingest, restored(ingest, 1)):
        feed(subject, batch(2, *[stored([1])] * (ODD_EVENTS_FORGOTTEN_AFTER - 2)))
        assert subject.profile.catalog.problem is not None
        feed(subject, batch(3, stored([1]), stored([1])))
        assert subject.profile.catalog.problem is None and [g.group_idx for g in subject.profile.catalog.groups] == [0]


def test_a_further_event_of_a_group_keeps_its_problem() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, removed([4], 3)))
    feed(ingest, batch(2, *[stored([1])] * 1_000), batch(3, removed([5], 3)), batch(4, *[stored([1])] * 1_000))
    assert ingest.profile.catalog.problem is not None
    feed(ingest, batch(5, stored([], 3, kv_cache_spec_kind="mamba")), batch(6, *[stored([1])] * 2_000))
    assert ingest.profile.catalog.problem is None and len(ingest.profile.catalog.groups) == 2


def test_a_removal_without_a_group_takes_a_copy_from_every_group_of_its_medium() -> None:
    ingest = feed(
        live(), batch(0, stored([1, 2]), stored([1], 1, kv_cache_spec_kind="mamba")), batch(1, removed([1], None))
    )
    assert ingest.profile.catalog.problem is None
    assert ingest.held.blocks.counts() == {"g0:GPU": 1, "g1:GPU": 0}
    on_cpu = WireStored([8], None, [], 0, None, CPU, None, group_idx=0)
    feed(ingest, batch(2, on_cpu), batch(3, removed([8], None)))
    assert ingest.held.blocks.counts()["g0:CPU"] == 1


def test_a_contradiction_is_forgotten_when_all_that_came_since_agrees() -> None:
    ingest = feed(
        live(), batch(0, stored([1])), batch(1, stored([2], kv_cache_spec_kind="mamba")), batch(2, stored([3]))
    )
    assert ingest.profile.catalog.problem is not None and "contradicts itself" in ingest.profile.catalog.problem
    feed(ingest, batch(3, *[stored([3])] * (ODD_EVENTS_FORGOTTEN_AFTER + 1)))
    assert ingest.profile.catalog.problem is None and [g.kind for g in ingest.profile.catalog.groups] == [
        "full_attention"
    ]


def test_a_store_without_a_group_is_forgotten_too() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, stored([2], None, kv_cache_spec_kind="full_attention")))
    assert ingest.profile.catalog.problem is not None
    feed(ingest, batch(2, *[stored([1])] * (ODD_EVENTS_FORGOTTEN_AFTER + 1)))
    assert ingest.profile.catalog.problem is None and [g.group_idx for g in ingest.profile.catalog.groups] == [0]
