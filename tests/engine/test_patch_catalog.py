# SPDX-License-Identifier: Apache-2.0
"""The declared catalog describes the running coordinator, for every layout, and follows its changes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvrouter.engine_patch.hooks import event_tap as tap
from kvrouter.engine_patch.hooks.declared_catalog import spec_classes
from kvrouter.events.patch.messages import CatalogMessage, DeclaredCatalog
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_block, reduce_hash
from tests.engine.engine_config import MAX_MODEL_LEN
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, GroupSet, OffloadSet
from tests.engine.oracle import Oracle
from tests.engine.patched import WatchedOracle, patched, tap_of
from tests.engine.workload import Prompt
from tests.support.report_peer import eventually

pytestmark = pytest.mark.engine

TOKENS = Prompt(tuple(range(64)))


def declared(oracle: WatchedOracle) -> DeclaredCatalog:
    catalog = oracle.peer.hello().catalog
    assert catalog is not None
    return catalog


def check(catalog: DeclaredCatalog, oracle: Oracle) -> None:
    """Compare a catalog with the objects that decide, read one by one and not by the code that reads the catalog."""
    scheduler = oracle.scheduler
    manager = scheduler.kv_cache_manager
    coordinator = manager.coordinator
    for group, spec, single in zip(
        catalog.groups, oracle.group_set.specs, coordinator.single_type_managers, strict=True
    ):
        assert group.kind == get_kv_cache_spec_kind(spec).value
        assert group.block_size == single.block_size == spec.block_size
        assert group.sliding_window == getattr(spec, "sliding_window", None)
        assert group.attention_chunk_size == getattr(spec, "attention_chunk_size", None)
        assert group.eagle == single.use_eagle
        assert group.prefix_cacheable
    assert [group.group_idx for group in catalog.groups] == list(range(len(oracle.group_set.specs)))
    if len(catalog.groups) > 1:
        jointly = [[g.group_idx for g in catalog.groups if g.spec_class == i] for i in range(len(catalog.groups))]
        assert [ids for ids in jointly if ids] == [entry.group_ids for entry in coordinator.attention_groups]
        assert catalog.align == coordinator._cache_hit_alignment_tokens
    else:
        assert catalog.groups[0].spec_class == 0
        assert catalog.align == coordinator.block_size
    assert catalog.hash_block_size == oracle.hash_block_size
    assert catalog.scheduler_block_size == coordinator.scheduler_block_size
    assert catalog.partial_hits == coordinator.enable_partial_hash_hits
    assert catalog.retention_interval == oracle.group_set.retention
    assert catalog.hash_algo == "sha256"
    assert catalog.none_hash == kv_cache_utils.NONE_HASH.hex()
    assert catalog.hash_lookahead_tokens == oracle.lookahead_tokens
    assert catalog.replay_window_tokens == 0
    assert catalog.extra_keys_form == "tagged"
    assert catalog.lora_paths == {}
    assert catalog.model_name == scheduler.vllm_config.model_config.served_model_name
    assert catalog.max_model_len == MAX_MODEL_LEN
    assert catalog.num_gpu_blocks == oracle.group_set.num_blocks == len(manager.block_pool.blocks)
    assert (catalog.dp_rank, catalog.dcp_size, catalog.pcp_size) == (0, 1, 1)
    assert catalog.engine_version == core.VLLM_VERSION


@pytest.mark.parametrize("group_set", GPU_SETS, ids=lambda group_set: group_set.name)
def test_equals_the_coordinators(group_set: GroupSet, model: Path, seed: int) -> None:
    with patched() as records, WatchedOracle(group_set, model, Random(seed)) as oracle:
        catalog = declared(oracle)
        check(catalog, oracle)
        assert catalog.connector is None and catalog.offload_blocks_per_chunk is None
    assert records.texts == []


@pytest.mark.parametrize("offload_set", OFFLOAD_SETS, ids=lambda offload_set: offload_set.name)
def test_equals_the_offload_tiers(offload_set: OffloadSet, model: Path, seed: int) -> None:
    group_set = offload_set.group_set
    with (
        patched() as records,
        WatchedOracle(group_set, model, Random(seed), offload_set.connector_config()) as oracle,
    ):
        catalog = declared(oracle)
        check(catalog, oracle)
        assert catalog.connector == "OffloadingConnector"
        assert catalog.offload_blocks_per_chunk == offload_set.blocks_per_chunk
    assert records.texts == []


@pytest.mark.parametrize("name", ["full", "full 16+mamba 64, partial hits"])
def test_the_example_is_the_engines_own_hash(name: str, model: Path, seed: int) -> None:
    group_set = next(group_set for group_set in GPU_SETS if group_set.name == name)
    with patched(), WatchedOracle(group_set, model, Random(seed)) as oracle:
        catalog = declared(oracle)
        example = catalog.hash_example
        assert example is not None and catalog.none_hash is not None
        request = oracle._request(Prompt((*example.token_ids, 0)), 1)
        assert len(example.token_ids) == oracle.hash_block_size
        assert example.block_hash == int.from_bytes(request.block_hashes[0][-8:], "big")
        # A router that knows nothing else computes the same hash.
        scheme = HashScheme.from_bytes(str(catalog.hash_algo), bytes.fromhex(catalog.none_hash))
        assert reduce_hash(hash_block(scheme, None, example.token_ids, None)) == example.block_hash


def test_uncached_groups_are_in_no_class() -> None:
    """Without prefix caching nothing is looked up, and no group has a class."""
    pool = SimpleNamespace(enable_caching=False)
    assert spec_classes(SimpleNamespace(block_pool=pool, single_type_managers=(None,))) == {}


def _lora(name: str, path: str, number: int = 1) -> Any:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def test_adapters_are_declared_as_loaded(model: Path, seed: int) -> None:
    """Declare adapters that are loaded over the engine core, or first seen with a request.

    A name that is loaded again from elsewhere has the new path.
    """
    with patched() as records, WatchedOracle(GPU_SETS[0], model, Random(seed)) as oracle:
        before = oracle.peer.hello()
        assert before.catalog_version == 1
        engine = object.__new__(core.EngineCore)
        engine.scheduler = oracle.scheduler
        engine.model_executor = SimpleNamespace(add_lora=lambda request: True)
        assert engine.add_lora(_lora("a", "/adapters/a")) is True
        eventually(lambda: declared(oracle).lora_paths == {"a": "/adapters/a"})
        request = oracle._request(TOKENS, 1)
        request.lora_request = _lora("b", "/adapters/b", 2)
        oracle.scheduler.add_request(request)
        eventually(lambda: declared(oracle).lora_paths == {"a": "/adapters/a", "b": "/adapters/b"})
        engine.add_lora(_lora("a", "/adapters/a"))
        engine.add_lora(_lora("a", "/adapters/other"))
        eventually(lambda: declared(oracle).lora_paths == {"a": "/adapters/other", "b": "/adapters/b"})
        assert oracle.peer.hello().catalog_version == 4
        messages: list[CatalogMessage] = []
        while not messages or messages[-1].version < 4:
            _, message = oracle.peer.next()
            if isinstance(message, CatalogMessage):
                messages.append(message)
        assert messages[-1].catalog == declared(oracle)
    assert records.texts == []


def test_of_many_adapters_those_last_used_are_declared(model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "MAX_LORAS", 2)
    with patched(), WatchedOracle(GPU_SETS[0], model, Random(seed)) as oracle:
        for name in "abac":
            tap_of(oracle).learn_lora(_lora(name, f"/adapters/{name}"))
        eventually(lambda: declared(oracle).lora_paths == {"a": "/adapters/a", "c": "/adapters/c"})


def test_none_hash_is_declared_as_soon_as_it_is_drawn(model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core builds its scheduler first, then draws NONE_HASH, before any request."""
    with patched() as records:
        monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
        # An oracle draws NONE_HASH beforehand; the engine core does not.
        monkeypatch.setattr("tests.engine.oracle.init_none_hash", lambda function: None)
        stock = core.init_none_hash
        with WatchedOracle(GPU_SETS[0], model, Random(seed)) as oracle:
            eventually(lambda: oracle.peer.hello().catalog_version == 1)
            assert declared(oracle).none_hash is None and declared(oracle).hash_example is None
            core.init_none_hash(sha256)
            assert core.init_none_hash is stock
            eventually(lambda: declared(oracle).none_hash == kv_cache_utils.NONE_HASH.hex())
            assert declared(oracle).hash_example is not None
    assert records.texts == []


def test_none_hash_of_an_unknown_engine_core_is_declared_with_the_first_request(
    model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patched() as records:
        monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
        monkeypatch.setattr("tests.engine.oracle.init_none_hash", lambda function: None)
        with WatchedOracle(GPU_SETS[0], model, Random(seed)) as oracle:
            kv_cache_utils.init_none_hash(sha256)
            assert declared(oracle).none_hash is None
            oracle.submit(TOKENS)
            eventually(lambda: declared(oracle).none_hash == kv_cache_utils.NONE_HASH.hex())
            assert tap_of(oracle).features.states()["catalog"] == "on"
    assert records.texts == []
