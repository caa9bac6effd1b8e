# SPDX-License-Identifier: Apache-2.0
"""Recognition of a worker's KV connector by its tier events, and the credit that it earns.

The events are the bytes that each connector of vLLM sends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvrouter.events.patch.messages import DeclaredCatalog
from kvrouter.events.transport.progress import CaughtUp
from kvrouter.events.vllm.stream_items import Connected
from kvrouter.events.vllm.wire import WireCleared, WireRemoved, WireStored
from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place
from kvrouter.router.index.ingest.declared_catalog import contradictions, declared_spec
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.kvcache.offload_connectors import (
    DISK_OWNER,
    HAND_OVER_ONLY,
    OFFLOADING,
    SIMPLE_CPU,
    TierRule,
    effective_connector,
)
from kvrouter.router.model.workers.registration import CatalogSpec
from tests.support.ingest_steps import batch, feed, make, restored
from tests.support.judging import judge

BLOCK = 16


def stored(block_hash: int, medium: str = GPU, **fields: Any) -> WireStored:
    """Return the event of one dense block of group 0, as the GPU's pool announces it, changed by `fields`."""
    arguments: dict[str, Any] = {
        "block_hashes": [block_hash], "parent_block_hash": block_hash - 1 or None, "token_ids": list(range(BLOCK)),
        "block_size": BLOCK, "lora_id": None, "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    return WireStored(medium=medium, **(arguments | fields))


PLACEHOLDER: dict[str, Any] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "kv_cache_spec_kind": None,
}
# By connector: the medium, and the fields that differ from the GPU's event of the same block.
# Sources: vLLM 0.32 and 0.33, offloading/events.py, simple_kv_offload/manager.py, mooncake/store/worker.py,
# umbp/scheduler.py, lmcache_connector.py; single_type_kv_cache_manager.py (HiSparse).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "offloading": (CPU, PLACEHOLDER),
    "offloading, self-describing": (CPU, {}),
    "offloading 0.33, self-describing, sparse group": (CPU, PLACEHOLDER | {"kv_cache_spec_kind": "full_attention"}),
    "this project's disk": (STORAGE, PLACEHOLDER | {"ownership": DISK_OWNER, "locality": "LOCAL"}),
    "simple": (CPU, {"locality": "LOCAL"}),
    "simple, hand-off": (CPU, {"locality": "LOCAL", "parent_block_hash": None, "token_ids": []}),
    "simple, second hash": (CPU, PLACEHOLDER | {"locality": "LOCAL", "kv_cache_spec_kind": "full_attention"}),
    "MooncakeStore": ("cpu", {"kv_cache_spec_kind": None}),
    "UMBP": (CPU, {"kv_cache_spec_kind": None, "locality": "LOCAL"}),
    "LMCache": ("cpu", {"kv_cache_spec_kind": None, "group_idx": None}),
    "fs tier": (STORAGE, PLACEHOLDER),
    "fs tier, self-describing": (STORAGE, {"locality": "LOCAL"}),
    "kvcr": (CPU, PLACEHOLDER | {"ownership": "kvcr"}),
    "simple, disk": (STORAGE, {"locality": "LOCAL"}),
}
SHOWN = {
    "offloading": OFFLOADING,
    "offloading, self-describing": OFFLOADING,
    "offloading 0.33, self-describing, sparse group": OFFLOADING,
    "this project's disk": OFFLOADING,
    "simple": SIMPLE_CPU,
    "simple, hand-off": SIMPLE_CPU,
    "simple, second hash": SIMPLE_CPU,
}


def event(shape: str, block_hash: int) -> WireStored:
    medium, fields = SHAPES[shape]
    return stored(block_hash, medium, **fields)


def follow(*batches: list[Any], catalog: CatalogSpec | None = None) -> Ingest:
    """Return the ingest of a worker whose stream brought these batches."""
    brought = [batch(seq, *events) for seq, events in enumerate(batches)]
    return feed(make(catalog=catalog), Connected(), CaughtUp(), *brought)


def hit_of(ingest: Ingest, num_tokens: int) -> tuple[int, ...]:
    """Return the hit that is predicted at this worker for a prompt of blocks 1, 2, ..., as tokens by tier."""
    resident = {
        place: (ingest.held.blocks.hashes(place) - np.uint64(1)).tolist() for place in ingest.held.blocks.places
    }
    hit = judge((), resident, num_tokens, catalog=ingest.profile.catalog)
    return hit.by_tier


ON_GPU = [stored(i, token_ids=[]) for i in range(1, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_earn_credit_only_where_events_prove_it(shape: str) -> None:
    ingest = follow(ON_GPU, [event(shape, i) for i in range(1, 9)])
    gpu, cpu, disk = hit_of(ingest, 8 * BLOCK)
    assert gpu == 64
    if shape in SHOWN:
        assert ingest.profile.catalog.offload.connector == SHOWN[shape] and not ingest.reason
        beyond = 128 if SHOWN[shape] == OFFLOADING else 112
        assert (cpu, disk) == ((64, 128) if SHAPES[shape][0] == STORAGE else (beyond, beyond))
    else:
        assert (cpu, disk) == (64, 64)
        assert "no credit" in ingest.reason


def test_a_host_pool_of_hisparse_earns_nothing() -> None:
    """Announce a group on CPU alone, as HiSparse's own block pool does."""
    host = {"group_idx": 1, "kv_cache_spec_kind": "mla_attention"}
    ingest = follow(ON_GPU, [stored(i, CPU, **host) for i in range(1, 9)])
    assert ingest.profile.catalog.offload.rule is None and "no credit" in ingest.reason
    assert hit_of(ingest, 200)[1:] == (0, 0)


@pytest.mark.parametrize("other", ["simple", "MooncakeStore", "UMBP", "LMCache"])
@pytest.mark.parametrize("first", [True, False])
def test_events_of_two_connectors_end_the_credit(other: str, first: bool) -> None:
    """Announce two connectors as a MultiConnector does, which takes the offer of the first one, however small."""
    shapes = (other, "offloading") if first else ("offloading", other)
    ingest = follow(ON_GPU, *[[event(shape, i) for i in range(1, 9)] for shape in shapes])
    assert ingest.profile.catalog.offload.rule is None and "no credit" in ingest.reason
    assert hit_of(ingest, 200) == (64, 64, 64)


def test_a_statement_that_the_events_refute_earns_nothing() -> None:
    ingest = follow(
        ON_GPU, [event("simple", i) for i in range(1, 9)], catalog=CatalogSpec(offload_connector=OFFLOADING)
    )
    assert "not of OffloadingConnector as stated" in ingest.reason
    assert hit_of(ingest, 200) == (64, 64, 64)


def test_a_chunk_size_is_one_of_an_offloading_connector() -> None:
    spec = CatalogSpec(offload_blocks_per_chunk=1)
    assert follow(ON_GPU, catalog=spec).profile.catalog.offload.connector == OFFLOADING
    assert follow(ON_GPU, [event("simple", 1)], catalog=spec).profile.catalog.offload.connector == SIMPLE_CPU


def test_disk_of_a_simple_connector_earns_where_it_is_stated() -> None:
    spec = CatalogSpec(offload_connector=SIMPLE_CPU)
    ingest = follow(ON_GPU, [event("simple, disk", i) for i in range(1, 9)], catalog=spec)
    assert hit_of(ingest, 128) == (64, 64, 112) and not ingest.reason


def test_a_connector_without_a_rule_is_named() -> None:
    spec = CatalogSpec(offload_connector="LMCacheConnectorV1")
    ingest = follow(ON_GPU, [event("LMCache", i) for i in range(1, 9)], catalog=spec)
    assert ingest.profile.catalog.offload.connector == "LMCacheConnectorV1" and "no credit" in ingest.reason
    assert hit_of(ingest, 200) == (64, 64, 64)


def test_the_learned_connector_survives_a_restart_of_the_router() -> None:
    before = follow(ON_GPU, [event("simple", i) for i in range(1, 9)])
    assert restored(before, 1).profile.catalog.offload == before.profile.catalog.offload


def test_a_clear_without_a_medium_leaves_no_credit_on_any() -> None:
    """Clear as a reset of the connector's pool does, like the GPU's; later removals of its blocks change nothing."""
    ingest = follow(ON_GPU, [event("simple", i) for i in range(1, 9)], [WireCleared()])
    assert hit_of(ingest, 200) == (0, 0, 0)
    feed(ingest, batch(3, event("simple", 1), *[WireRemoved([i], CPU, 0, locality="LOCAL") for i in (1, 2)]))
    assert hit_of(ingest, 200) == (0, 0, 0)


def test_a_block_stays_until_its_last_copy_is_removed() -> None:
    twice = [event("simple", i) for i in (5, 5, 6)]
    ingest = follow(ON_GPU, twice, [WireRemoved([5], CPU, 0, locality="LOCAL")])
    assert hit_of(ingest, 200)[1] == 96
    feed(ingest, batch(3, WireRemoved([5], CPU, 0, locality="LOCAL")))
    assert hit_of(ingest, 200)[1] == 64


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ([OFFLOADING], TierRule.CHUNKS),
        ([SIMPLE_CPU], TierRule.SUFFIX),
        (["MultiConnector", "NixlConnector", OFFLOADING], TierRule.CHUNKS),
        (["MultiConnector", OFFLOADING, "NixlPushConnector"], TierRule.CHUNKS),
        (["MultiConnector", "MultiConnector", "MoRIIOConnector", SIMPLE_CPU], TierRule.SUFFIX),
        (["MultiConnector", OFFLOADING, SIMPLE_CPU], None),
        (["MultiConnector", OFFLOADING, OFFLOADING], None),
        (["MultiConnector", "LMCacheConnectorV1", OFFLOADING], None),
        (["MultiConnector", OFFLOADING, "LMCacheMPConnector"], None),
        (["MultiConnector"], None),
        (["my.module.OffloadingConnector"], None),
        (["HF3FSKVConnector"], None),
        *[([name], None) for name in sorted(HAND_OVER_ONLY)],
    ],
)
def test_a_declared_connector_earns_by_its_own_rule_or_not_at_all(names: list[str], rule: TierRule | None) -> None:
    connector = effective_connector(names)
    ingest = follow(ON_GPU, catalog=CatalogSpec(offload_connector=connector))
    assert connector is not None and ingest.profile.catalog.offload.rule is rule
    assert bool(ingest.profile.catalog.offload.problem) is (rule is None)


@pytest.mark.parametrize(
    ("declared", "rule"),
    [
        (DeclaredCatalog([], connector=OFFLOADING), TierRule.CHUNKS),
        (
            DeclaredCatalog([], connector=SIMPLE_CPU, connectors=[SIMPLE_CPU], offload_partial_hits=True),
            TierRule.SUFFIX,
        ),
        # The patch does not name the connectors inside this one.
        (DeclaredCatalog([], connector="MultiConnector", offload_blocks_per_chunk=1), None),
        (DeclaredCatalog([], connector=f"{OFFLOADING} with my.Manager", offload_blocks_per_chunk=1), None),
    ],
)
def test_the_statement_of_the_engine_decides(declared: DeclaredCatalog, rule: TierRule | None) -> None:
    stated = CatalogSpec(offload_connector=OFFLOADING)
    tier = follow(ON_GPU, catalog=declared_spec(declared, stated)).profile.catalog.offload
    assert tier.rule is rule and tier.finer_suffix is bool(declared.offload_partial_hits)
    assert ("offload_connector" in contradictions(declared_spec(declared, stated), stated)) is (
        tier.connector != OFFLOADING
    )


def test_an_engine_without_a_connector_declares_none() -> None:
    assert effective_connector([]) is None


def test_unknown_until_the_group_was_seen_on_the_gpu() -> None:
    """A self-describing event alone could come from HiSparse's host pool; GPU events of its group rule that out."""
    tier = [event("offloading, self-describing", i) for i in range(1, 9)]
    ingest = follow(tier)
    assert "do not show yet" in ingest.reason and hit_of(ingest, 200) == (0, 0, 0)
    ingest = follow(tier, [stored(9, token_ids=[])], [event("offloading, self-describing", 8)])
    assert ingest.profile.catalog.offload.connector == OFFLOADING and hit_of(ingest, 200) == (0, 128, 128)


def test_places_that_earn_nothing_are_named_with_their_owner() -> None:
    ingest = follow(ON_GPU, [event("offloading", i) for i in range(1, 9)], [event("kvcr", 9)])
    assert "CPU of kvcr" in ingest.reason
    assert hit_of(ingest, 200)[1] == 128
    assert Place(0, CPU, "kvcr") in ingest.held.blocks.places
