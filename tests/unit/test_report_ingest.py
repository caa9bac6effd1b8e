# SPDX-License-Identifier: Apache-2.0
"""Meaning of the engine patch's reports, item by item: snapshots, proofs by heartbeat, the declared catalog.

The tests use no sockets.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.events.patch.items import (
    Declared,
    Expired,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    Snapshot,
    SnapshotFailed,
    SnapshotPlace,
)
from kvrouter.events.patch.messages import (
    DeclaredCatalog,
    DeclaredGroup,
    Events,
    HashExample,
    Heartbeat,
    Hello,
    PlaceSummary,
    ReportCleared,
    ReportRemoved,
    ReportStored,
    pack_hashes,
)
from kvrouter.events.transport.progress import CaughtUp
from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.stream_items import Batch, Connected, Disconnected, Proven, fingerprint
from kvrouter.events.vllm.wire import WireStored
from kvrouter.router.base.common.ids import CPU, GPU, Place
from kvrouter.router.index.ingest.engine_liveness import EngineRestarted
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.residency import PlaceSum
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_block, reduce_hash
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec
from kvrouter.router.model.workers.stream_state import CREDITED, StreamState
from tests.support.ingest_steps import feed, make, taken

EPOCH, OTHER = "aa" * 8, "bb" * 8


def hello(epoch: str = EPOCH) -> Greeted:
    return Greeted(Hello(1, epoch, 1.0, 0, "tcp://127.0.0.1:3", 1.0, patch_version="0.1"))


def snapshot(next_seq: int, places: dict[Place, dict[int, int]], epoch: str = EPOCH) -> Loaded:
    return Loaded(
        Snapshot(
            epoch,
            1.0,
            next_seq,
            [
                SnapshotPlace(
                    place.group_idx,
                    place.medium,
                    place.ownership,
                    np.array(list(copies), np.uint64),
                    [(h, n) for h, n in copies.items() if n > 1],
                )
                for place, copies in places.items()
            ],
            [],
        )
    )


def stored(hashes: list[int], group: int = 0, medium: str = GPU, **fields: Any) -> ReportStored:
    return ReportStored(pack_hashes(hashes), group, medium, 16, kind="full_attention", **fields)


def removed(hashes: list[int], group: int = 0, medium: str = GPU) -> ReportRemoved:
    return ReportRemoved(pack_hashes(hashes), group, medium)


def events(seq: int, *what: Any, epoch: str = EPOCH) -> ReportBatch:
    return ReportBatch(seq, Events(epoch, 1.0, 2.0, list(what)))


def beat(next_seq: int, places: dict[Place, dict[int, int]]) -> HeartbeatSeen:
    sums = [
        PlaceSummary(place.group_idx, place.medium, len(c), sum(c.values()), sum(c) % 2**64, place.ownership)
        for place, c in places.items()
    ]
    return HeartbeatSeen(next_seq, Heartbeat(EPOCH, 1.0, 2.0, 1.0, sums))


def net(ingest: Ingest) -> tuple[str, tuple[int, int] | None, dict[str, tuple[list[int], list[int]]]]:
    flush = taken(ingest)
    changes = {c.place.text: (sorted(c.added.tolist()), sorted(c.removed.tolist())) for c in flush.changes}
    return flush.epoch, flush.seqs, changes


def live(*items: Any, catalog: CatalogSpec | None = None) -> Ingest:
    ingest = make(catalog=catalog)
    ingest.follow_reports()
    return feed(ingest, hello(), Connected(), *items)


def test_a_snapshot_is_the_residency_and_its_seq() -> None:
    ingest = live(snapshot(5, {Place(0, GPU): {1: 1, 2: 3}, Place(0, CPU): {9: 1}}))
    assert ingest.state is StreamState.LIVE and ingest.held.seq == 4
    epoch, seqs, changes = net(ingest)
    assert seqs == (4, 4) and changes == {"g0:GPU": ([1, 2], []), "g0:CPU": ([9], [])}
    feed(ingest, events(5, removed([2]), removed([1])))
    assert net(ingest) == (epoch, (5, 5), {"g0:GPU": ([], [1])})


def test_a_snapshot_is_not_live_before_what_came_meanwhile_is_applied() -> None:
    ingest = live()
    ingest.apply(snapshot(5, {Place(0, GPU): {1: 1, 2: 3}}), 1.0)
    ingest.apply(events(5, removed([1])), 1.0)
    assert ingest.state is StreamState.CATCHING_UP
    ingest.apply(CaughtUp(), 1.0)
    assert ingest.state is StreamState.LIVE and not ingest.reason


def test_nothing_earns_credit_before_the_first_snapshot() -> None:
    ingest = live()
    assert ingest.state is StreamState.CATCHING_UP and ingest.held.blocks.counts() == {} and "snapshot" in ingest.reason


def test_after_a_gap_the_snapshot_changes_only_what_differs_in_the_same_epoch() -> None:
    ingest = live(snapshot(5, {Place(0, GPU): {1: 1, 2: 1}}))
    epoch = net(ingest)[0]
    feed(ingest, ReportGap(5, 9, 4, "queue full"))
    assert ingest.state is StreamState.RESYNCING and ingest.state not in CREDITED and ingest.profile.tally.gaps == 1
    assert "5 to 8" in ingest.reason
    feed(ingest, snapshot(9, {Place(0, GPU): {2: 1, 3: 1}}))
    assert ingest.state is StreamState.LIVE and net(ingest) == (epoch, (5, 8), {"g0:GPU": ([3], [1])})


def test_a_snapshot_that_has_no_seq_of_its_own_begins_a_new_epoch() -> None:
    ingest = live(snapshot(5, {Place(0, GPU): {1: 1}}))
    epoch = net(ingest)[0]
    feed(ingest, snapshot(5, {Place(0, GPU): {2: 1}}))
    again, seqs, changes = net(ingest)
    assert again != epoch and seqs == (4, 4) and changes == {"g0:GPU": ([2], [])}


def test_a_new_epoch_voids_at_once() -> None:
    ingest = live(snapshot(5, {Place(0, GPU): {1: 1}}))
    net(ingest)
    feed(ingest, NewEpoch(OTHER, 3.0, "another life"))
    assert (
        ingest.held.blocks.counts() == {}
        and ingest.state is StreamState.RESYNCING
        and ingest.profile.tally.restarts == 1
    )
    feed(ingest, snapshot(0, {}, OTHER))
    assert ingest.state is StreamState.LIVE and ingest.held.seq is None and ingest.reports.resume is not None
    feed(ingest, events(0, stored([7]), epoch=OTHER))
    assert net(ingest)[1:] == ((0, 0), {"g0:GPU": ([7], [])})


def test_a_clear_names_its_medium_and_its_owner() -> None:
    ledger = {
        Place(0, GPU): {1: 1},
        Place(0, CPU): {1: 1},
        Place(0, "STORAGE", "a"): {1: 1},
        Place(0, "STORAGE", "b"): {1: 1},
    }
    ingest = live(snapshot(1, ledger), events(1, ReportCleared("CPU", "connector reset")))
    assert ingest.held.blocks.counts() == {"g0:CPU": 0, "g0:GPU": 1, "g0:STORAGE:a": 1, "g0:STORAGE:b": 1}
    feed(ingest, events(2, ReportCleared("STORAGE", ownership="a")))
    assert ingest.held.blocks.counts()["g0:STORAGE:b"] == 1 and ingest.held.blocks.counts()["g0:STORAGE:a"] == 0


@pytest.mark.parametrize(
    "said",
    [{1: 1, 2: 1}, {1: 1}, {1: 1, 3: 2}, {1: 1, 2: 2, 3: 1}, {}],
    ids=["fewer copies", "a block less", "another block", "a block more", "nothing"],
)
def test_a_heartbeat_that_disagrees_ends_all_credit_until_a_snapshot(said: dict[int, int]) -> None:
    place = Place(0, GPU)
    ingest = live(snapshot(1, {place: {1: 1, 2: 2}}), beat(1, {place: {1: 1, 2: 2}}))
    assert (
        ingest.state is StreamState.LIVE
        and ingest.profile.tally.heartbeats == 1
        and ingest.profile.tally.mismatches == 0
    )
    feed(ingest, beat(1, {place: said} if said else {}))
    assert (
        ingest.state is StreamState.RESYNCING and ingest.profile.tally.mismatches == 1 and ingest.reports.wants_snapshot
    )
    assert "g0:GPU" in ingest.reason
    feed(ingest, snapshot(2, {place: said}), beat(2, {place: said} if said else {}))
    assert (
        ingest.state is StreamState.LIVE
        and ingest.reports.wants_snapshot is None
        and ingest.profile.tally.snapshots == 2
    )


def test_two_localities_of_one_place_are_counted_together_and_not_compared() -> None:
    place = Place(0, CPU)
    local, remote = snapshot(1, {place: {1: 1, 2: 3}}), snapshot(1, {place: {2: 1, 3: 2}})
    joined = msgspec.structs.replace(local.snapshot, places=local.snapshot.places + remote.snapshot.places)
    ingest = live(Loaded(joined))
    assert ingest.held.blocks.sums()[place] == PlaceSum(3, 7, 6)
    beats = [beat(1, {place: {1: 1, 2: 3}}), beat(1, {place: {2: 1, 3: 2}})]
    message = msgspec.structs.replace(beats[0].message, places=beats[0].message.places + beats[1].message.places)
    feed(ingest, HeartbeatSeen(1, message))
    assert ingest.state is StreamState.LIVE


def test_silence_is_suspect_until_a_heartbeat_proves_the_state() -> None:
    place = Place(0, GPU)
    ingest = live(snapshot(1, {place: {1: 1}}))
    feed(ingest, PatchSilent(3.0))
    assert ingest.state is StreamState.SUSPECT and "3.0 s" in ingest.reason and ingest.state in CREDITED
    feed(ingest, PatchHeard())
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, beat(1, {place: {1: 1}}))
    assert ingest.state is StreamState.LIVE and not ingest.reason
    feed(ingest, Disconnected())
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, Connected(), beat(1, {place: {1: 1}}))
    assert ingest.state is StreamState.LIVE


def test_a_snapshot_of_a_patch_whose_reports_do_not_come_proves_nothing_of_what_follows() -> None:
    ingest = live(snapshot(1, {Place(0, GPU): {1: 1}}))
    feed(ingest, PatchSilent(3.0))
    # The engine's HTTP says that it is another process, so a snapshot is requested, although no reports come.
    ingest.on_liveness(EngineRestarted("another start"))
    feed(ingest, Expired(), snapshot(2, {Place(0, GPU): {1: 1}}))
    assert ingest.state is StreamState.SUSPECT
    feed(ingest, PatchHeard(), beat(2, {Place(0, GPU): {1: 1}}))
    assert ingest.state is StreamState.LIVE


def test_a_gap_stays_a_gap_however_the_connection_comes_and_goes() -> None:
    ingest = live(
        snapshot(1, {Place(0, GPU): {1: 1}}), ReportGap(1, 2, 0, "x"), Disconnected(), Connected(), PatchSilent(3.0)
    )
    assert ingest.state is StreamState.RESYNCING
    feed(ingest, SnapshotFailed("busy"))
    assert ingest.state is StreamState.RESYNCING and "busy" in ingest.reason


CATALOG = DeclaredCatalog(
    groups=[
        DeclaredGroup(0, "full_attention", 32, spec_class=0),
        DeclaredGroup(1, "sliding_window", 16, sliding_window=64, eagle=True, spec_class=1),
        DeclaredGroup(2, "chunked_local_attention", 16, attention_chunk_size=256, prefix_cacheable=False),
    ],
    hash_block_size=16,
    scheduler_block_size=32,
    align=32,
    partial_hits=False,
    hash_algo="sha256",
    none_hash=HashScheme.default().none_hash.hex(),
    lora_paths={"a": "/adapters/a"},
    offload_blocks_per_chunk=2,
)


def test_the_declared_catalog_is_used_at_once() -> None:
    ingest = live(Declared(1, CATALOG))
    catalog = ingest.profile.catalog
    assert catalog.source == "declared" and catalog.problem is None
    assert catalog.hash_block_size == 16 and catalog.align == 32 and catalog.blocks_per_chunk == 2
    assert [group.kind for group in catalog.cacheable] == ["full_attention", "sliding_window"]
    assert catalog.groups[1].eagle and ingest.profile.spec.lora_paths == {"a": "/adapters/a"}
    assert ingest.profile.identity.label.endswith("(declared)")


def test_reports_of_another_rank_are_not_credited_until_the_rank_is_right() -> None:
    ingest = live(Declared(1, _with(dp_rank=1)), snapshot(5, {Place(0, GPU): {1: 1}}))
    assert ingest.state is StreamState.LIVE, "the only core behind its address may have any rank"
    ingest.allow_ranks(frozenset({0}))
    assert ingest.state is StreamState.MISMATCHED and "publishes rank 1" in ingest.reason
    feed(ingest, Declared(2, CATALOG))
    assert ingest.state is StreamState.LIVE and ingest.reason == ""


def test_the_declared_catalog_overrides_the_registration_and_contradictions_are_named() -> None:
    stated = CatalogSpec(groups=(GroupSpec(0, "full_attention", 16),), hash_block_size=8, lora_paths={"b": "/b"})
    ingest = live(Declared(1, CATALOG), snapshot(0, {}), catalog=stated)
    assert ingest.profile.catalog.source == "declared" and ingest.profile.catalog.hash_block_size == 16
    assert (
        ingest.reason
        == "the registered catalog differs from the engine's in groups, hash_block_size; the engine's is used"
    )
    assert ingest.profile.spec.lora_paths == {"a": "/adapters/a", "b": "/b"}


def test_the_example_proves_the_hashing_or_refutes_it() -> None:
    tokens = list(range(16))
    right = reduce_hash(hash_block(HashScheme.default(), None, tokens, None))
    ingest = live(Declared(1, _with(hash_example=HashExample(tokens, right))), snapshot(0, {}))
    assert ingest.state is StreamState.LIVE and ingest.profile.identity.label.endswith("(verified)")
    feed(ingest, Declared(2, _with(hash_example=HashExample(tokens, right ^ 1))))
    assert ingest.state is StreamState.UNHASHABLE


def _with(**changes: Any) -> DeclaredCatalog:
    changed: DeclaredCatalog = msgspec.structs.replace(CATALOG, **changes)
    return changed


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"replay_window_tokens": 64}, "bounded replay"),
        ({"hash_algo": "md5"}, "hash scheme cannot be computed"),
        ({"none_hash": "00"}, "hash scheme cannot be computed"),
    ],
)
def test_an_unsupported_catalog_earns_no_credit_and_names_the_reason(changes: dict[str, Any], word: str) -> None:
    assert word in (live(Declared(1, _with(**changes))).profile.catalog.problem or "")


def test_without_a_declared_catalog_it_is_learned_from_the_reports() -> None:
    ingest = live(snapshot(0, {}), events(0, stored([1]), stored([1], medium=CPU)))
    assert ingest.profile.catalog.source == "learned" and ingest.profile.catalog.problem is None
    assert ingest.profile.catalog.blocks_per_chunk is None


def restored(ingest: Ingest) -> Ingest:
    flush, again = taken(ingest), make()
    assert flush.seqs is not None
    places = {c.place: c.added for c in flush.changes}
    copies = {(place, h): n for place, h, n in flush.copies}
    again.restore(flush.epoch, flush.seqs[1], places, copies, flush.meta)
    return again


@pytest.mark.parametrize(
    ("withheld", "what"),
    [
        ({"withheld": "components: failed"}, "no longer reports anything (components: failed)"),
        ({"tiers_withheld": "offload: failed"}, "what lies beside the GPU, which earns no credit (offload: failed)"),
        ({"withheld": "a\n" + 10_000 * "b"}, "no longer reports anything ('a\\nb"),
    ],
)
def test_withheld_reports_are_a_reason_until_they_return(withheld: dict[str, str], what: str) -> None:
    ingest = live(snapshot(5, {Place(0, GPU): {1: 1}}))
    feed(ingest, events(5, ReportCleared(GPU, "failed")))
    feed(ingest, HeartbeatSeen(6, msgspec.structs.replace(beat(6, {}).message, **withheld)))
    assert ingest.state is StreamState.LIVE and not any(ingest.held.blocks.counts().values())
    assert what in ingest.reason and len(ingest.reason) < 1_000
    ingest.follow_stock()
    assert ("withheld" in withheld) is ("reports anything" in ingest.reason)
    ingest.follow_reports()
    assert "no longer reports" not in ingest.reason


def test_a_restored_index_is_suspect_until_the_first_heartbeat_proves_it() -> None:
    place = Place(0, GPU)
    again = restored(live(Declared(1, CATALOG), snapshot(5, {place: {1: 1, 2: 2}})))
    assert again.reports.resume is not None and (again.reports.resume.epoch, again.reports.resume.next_seq) == (
        EPOCH,
        5,
    )
    assert again.resume_point is None and again.profile.catalog.source == "declared"
    again.follow_reports()
    feed(again, hello(), Connected())
    assert again.state is StreamState.SUSPECT and again.held.blocks.counts() == {"g0:GPU": 2}
    feed(again, beat(5, {place: {1: 1, 2: 2}}))
    assert again.state is StreamState.LIVE and not again.held.has_news


def test_a_restored_index_of_another_life_earns_no_credit_from_the_greeting_on() -> None:
    again = restored(live(Declared(1, CATALOG), snapshot(5, {Place(0, GPU): {1: 1, 2: 2}})))
    again.follow_reports(EPOCH)
    assert again.state is StreamState.SUSPECT
    again.follow_reports("another")
    assert again.state is StreamState.RESYNCING and "another life" in again.reason


def test_without_its_patch_an_engine_is_learned_from_its_own_topic() -> None:
    ingest = live(Declared(1, CATALOG), snapshot(5, {Place(0, GPU): {1: 1}}))
    net(ingest)
    ingest.follow_stock()
    assert ingest.held.blocks.counts() == {} and ingest.reports.resume is None and ingest.resume_point is None
    assert ingest.profile.catalog.source == "learned" and ingest.profile.patch.greeting is None
    event = WireStored([5], None, [], 16, None, GPU, None, group_idx=0, kv_cache_spec_kind="full_attention")
    payload = encode_batch(1.0, [event])
    feed(ingest, Connected(), CaughtUp(), Batch(0, payload, fingerprint(payload), False))
    assert ingest.state is StreamState.LIVE and net(ingest)[1:] == ((0, 0), {"g0:GPU": ([5], [])})
    assert ingest.resume_point is not None


def test_residency_from_the_engines_topic_is_replaced_by_the_patchs_snapshot() -> None:
    ingest = make()
    event = WireStored([5], None, [], 16, None, GPU, None, group_idx=0, kv_cache_spec_kind="full_attention")
    payload = encode_batch(1.0, [event])
    feed(ingest, Connected(), Proven(0, "replay"), Batch(70, payload, fingerprint(payload), False))
    epoch = net(ingest)[0]
    ingest.follow_reports()
    feed(ingest, hello(), Connected(), snapshot(3, {Place(0, GPU): {6: 1}}))
    again, seqs, changes = net(ingest)
    assert again != epoch and seqs == (2, 2) and changes == {"g0:GPU": ([6], [])}


@pytest.mark.parametrize("follows", ["a restart", "another epoch"])
def test_a_patch_without_a_snapshot_leaves_nothing_missing(follows: str) -> None:
    ingest = make()
    ingest.follow_reports(EPOCH)
    feed(ingest, Connected())
    if follows == "a restart":
        ingest.on_liveness(EngineRestarted("another start"))
        feed(ingest, Expired())
    else:
        feed(ingest, NewEpoch(OTHER, 1.0, "another life answers"))
    # The engine now has neither a patch nor a replay endpoint.
    ingest.pause("")
    ingest.follow_stock()
    payload = encode_batch(1.0, [])
    feed(ingest, Connected(), Batch(0, payload, fingerprint(payload), False))
    assert ingest.state is StreamState.LIVE, ingest.reason
