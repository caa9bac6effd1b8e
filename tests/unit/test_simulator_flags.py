# SPDX-License-Identifier: Apache-2.0
"""Replicas that were started without a flag that a router needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.simulator.cache.hashing import root_hash
from kvrouter.simulator.cache.shapes import gpt_oss
from kvrouter.simulator.http.engine_flags import EngineFlags
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.exchange import exchange
from tests.support.json_http import call

BLOCKS = 40
PROMPT = list(range(100))

NewReplica = Callable[[EngineFlags], ReplicaServer]


@pytest.fixture
def new_replica() -> Iterator[NewReplica]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        threads: list[ServerThread] = []

        def start(flags: EngineFlags) -> ReplicaServer:
            server = ReplicaServer(gpt_oss(16, 32), BLOCKS, context=context, model="m", flags=flags)
            threads.append(ServerThread([server]))
            threads[-1].start()
            return server

        yield start
        for thread in threads:
            thread.stop()


def usage(server: ReplicaServer) -> Any:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
    return call(f"{server.endpoints['url']}/v1/completions", body)["usage"]


def get(server: ReplicaServer, path: str, key: str = "") -> tuple[int, bytes]:
    port = int(server.endpoints["url"].rpartition(":")[2])
    answer = exchange(port, "GET", path, None, {"authorization": f"Bearer {key}"} if key else {})
    return answer.status, answer.content


def cached_tokens(server: ReplicaServer) -> int:
    usage(server)
    return int(usage(server)["prompt_tokens_details"]["cached_tokens"])


def test_a_replica_with_all_flags_reuses_and_describes_its_cache(new_replica: NewReplica) -> None:
    server = new_replica(EngineFlags())
    assert cached_tokens(server) > 0
    cache = VLLM.cache_in(get(server, "/metrics")[1], 0)
    assert cache is not None and (cache.prefix_caching, cache.block_size, cache.blocks) == (True, 16, BLOCKS)


def test_without_prefix_caching_nothing_is_kept_or_published(new_replica: NewReplica) -> None:
    server = new_replica(EngineFlags(prefix_caching=False))
    assert cached_tokens(server) == 0
    assert not server.replica.pool.resident() and server.publisher.next_seq == 0
    cache = VLLM.cache_in(get(server, "/metrics")[1], 0)
    assert cache is not None and cache.prefix_caching is False


def test_without_kv_events_nothing_is_published_and_the_replica_says_so(new_replica: NewReplica) -> None:
    server = new_replica(EngineFlags(kv_events=False))
    assert cached_tokens(server) > 0 and server.publisher.next_seq == 0
    answers = VLLM.streams_in(get(server, "/kv_event_sources")[1], server.endpoints["url"])
    assert answers.streams == {} and "publishes no KV events" in answers.problem


def test_without_details_usage_has_no_cached_tokens(new_replica: NewReplica) -> None:
    assert usage(new_replica(EngineFlags(prompt_tokens_details=False)))["prompt_tokens_details"] is None


def test_the_seed_decides_the_hashes(new_replica: NewReplica) -> None:
    server = new_replica(EngineFlags(hash_seed="42"))
    assert server.replica._root == root_hash("42") != root_hash()
