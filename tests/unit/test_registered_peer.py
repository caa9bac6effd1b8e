# SPDX-License-Identifier: Apache-2.0
"""The address of vLLM's own p2p tier: as registered, as checked, and as peers compare it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.contract.registrations import RegisterBody, WorkerPatch
from kvrouter.router.base.common.errors import BadQuestion, SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.fleet import STREAMLESS_FIELDS
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Catalog, Group
from kvrouter.router.model.kvcache.offload_connectors import OFFLOADING, UNKNOWN, OffloadTier, TierRule
from kvrouter.router.model.kvcache.registered_peer import registered_peer
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.registration_from_body import patched, registration_of

SCHEME = HashScheme.from_seed("sha256", "0")
CATALOG = Catalog(
    groups=(Group(0, "full_attention", 16), Group(1, "sliding_window", 16, sliding_window=64)),
    source="learned",
    problem=None,
    hash_block_size=16,
    scheduler_block_size=16,
    partial_hits=False,
    blocks_per_chunk=2,
    offload=OffloadTier(OFFLOADING, TierRule.CHUNKS, ""),
)


def worker(name: str, rank: int = 0, peer: str | None = "10.0.0.5:5710") -> Registration:
    return Registration(WorkerKey("m", name, rank), events="tcp://10.0.0.5:1", peer=peer)


def test_workers_with_equal_caches_are_peers_wherever_they_are() -> None:
    first = registered_peer(worker("a"), CATALOG, SCHEME)
    other = registered_peer(worker("b", 3, "host-b:5710"), CATALOG, SCHEME)
    assert first is not None and other is not None
    assert (first.host, first.port, other.host, other.port) == ("10.0.0.5", 5710, "host-b", 5713)
    assert (first.exchange, first.resets) == (other.exchange, other.resets)
    assert first.exchange.startswith("vllm-p2p:")
    # The view of a worker is compared at each change, so the address stays the same object.
    assert registered_peer(worker("a"), CATALOG, SCHEME) is first


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, HashScheme.from_seed("sha256", "1")),
        ({}, HashScheme.from_seed("sha256_cbor", "0")),
        ({"blocks_per_chunk": 4}, SCHEME),
        ({"hash_block_size": 8}, SCHEME),
        ({"groups": (Group(0, "full_attention", 32),)}, SCHEME),
    ],
    ids=["seed", "algorithm", "chunk", "block", "groups"],
)
def test_workers_whose_caches_differ_are_no_peers(changes: dict[str, Any], scheme: HashScheme) -> None:
    first = registered_peer(worker("a"), CATALOG, SCHEME)
    other = registered_peer(worker("b"), msgspec.structs.replace(CATALOG, **changes), scheme)
    assert first is not None and other is not None and first.exchange != other.exchange


def test_an_address_is_of_no_use_before_the_cache_is_known() -> None:
    unusable = [
        (worker("a", peer=None), CATALOG, SCHEME),
        (worker("a"), None, SCHEME),
        (worker("a"), CATALOG, None),
        (worker("a"), msgspec.structs.replace(CATALOG, problem="a group is unknown"), SCHEME),
        (worker("a"), msgspec.structs.replace(CATALOG, blocks_per_chunk=None), SCHEME),
        (worker("a"), msgspec.structs.replace(CATALOG, offload=UNKNOWN), SCHEME),
        (worker("a", 9, "10.0.0.5:65530"), CATALOG, SCHEME),
    ]
    assert [registered_peer(*facts) for facts in unusable] == [None] * len(unusable)


def test_an_address_comes_by_registration_by_line_and_by_list() -> None:
    body = RegisterBody(worker_id="a", model="m", url="http://h:1", peer="10.0.0.5:5710")
    registration = registration_of(body)
    assert registration.peer == "10.0.0.5:5710"
    assert listed_worker("a=http://h:1,model=m,peer=10.0.0.5:5710").registration.peer == "10.0.0.5:5710"
    entry = {"worker_id": "a", "model": "m", "url": "http://h:1", "peer": "10.0.0.5:5710"}
    assert listed_worker(entry).registration.peer == "10.0.0.5:5710"
    assert patched(registration, WorkerPatch()).peer == "10.0.0.5:5710"
    assert patched(registration, WorkerPatch(peer=None)).peer is None
    # A change of the address leaves the worker's index as it is.
    assert "peer" in STREAMLESS_FIELDS


@pytest.mark.parametrize(
    "peer",
    ["10.0.0.5", ":5710", "10.0.0.5:0", "10.0.0.5:70000", "[fd00::5]:5710", "*:5710", "0.0.0.0:1", "h/x:1", "h:1 "],
)
def test_an_address_that_no_engine_can_reach_is_refused_with_an_example(peer: str) -> None:
    with pytest.raises(BadQuestion, match=r"peer must be HOST:PORT like 10\.0\.0\.5:5710"):
        registration_of(RegisterBody(worker_id="a", model="m", url="http://h:1", peer=peer))
    with pytest.raises(SettingError, match="peer must be HOST:PORT"):
        listed_worker(f"a=http://h:1,model=m,peer={peer}")


def test_the_port_of_a_rank_must_exist() -> None:
    with pytest.raises(BadQuestion, match="at most 65535, not 65536"):
        registration_of(RegisterBody(worker_id="a", model="m", url="http://h:1", dp_rank=6, peer="h:65530"))
