# SPDX-License-Identifier: Apache-2.0
"""Several routers, each with its own sources, on one real store: registrations, withdrawals and outages."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import redis

from kvrouter.router.base.common.errors import Conflict
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.discovery.candidate import candidate_of
from kvrouter.router.follow.discovery.kubernetes.access import Access
from kvrouter.router.follow.discovery.kubernetes.api import ClusterApi
from kvrouter.router.follow.discovery.kubernetes.source import KubernetesSource
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.registry import Registry
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import FILE, KUBERNETES, STATIC
from tests.contract.lead_support import until
from tests.support.engine_http import EngineHttp
from tests.support.fake_cluster import NAMESPACE, TOKEN, FakeCluster, pod
from tests.support.listed_routers import STILL_S, TIMEOUT_S, Listed, routing

A, B, C = "a=http://127.0.0.1:1", "b=http://127.0.0.1:2", "c=http://127.0.0.1:3"


async def test_a_store_that_is_emptied_while_the_registry_is_read_loses_nobody(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Registry.load
    emptied: list[None] = []
    client = redis.Redis.from_url(url)

    async def emptied_first(self: Registry) -> Any:
        if not emptied:
            client.flushall()
            emptied.append(None)
        return await load(self)

    async with routing(url) as router:
        await router.core.register(Registration(WorkerKey("m", "own"), url="http://127.0.0.1:9"))
        await router.owners_are(own="register")
        monkeypatch.setattr(Registry, "load", emptied_first)
        client.incr(keys.REGISTRATIONS)
        async with asyncio.timeout(TIMEOUT_S):
            while not (emptied and client.exists(keys.registry("m"))):
                await asyncio.sleep(0.01)
        await router.owners_are(own="register")
    client.close()


async def test_a_worker_that_left_while_the_store_took_no_writes_is_followed_when_it_returns(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = IndexStore.forget
    refused: list[WorkerKey] = []

    async def refused_first(self: IndexStore, worker: WorkerKey, token: str) -> bool:
        if not refused:
            refused.append(worker)
            raise StoreError("OOM command not allowed")
        return await forget(self, worker, token)

    worker = WorkerKey("m", "own")
    registration = Registration(worker, url="http://127.0.0.1:9")
    async with routing(url) as left, routing(url) as right:
        routers = (left.core, right.core)

        def following() -> list[bool]:
            return [
                worker in core.registry.followers and core.registry.followers[worker].lease.held for core in routers
            ]

        await left.core.register(registration)
        await until(
            lambda: any(following()) and all(worker in core.registry.followers for core in routers),
            "nobody follows the worker, or only one router knows it",
        )
        follower, other = routers if following()[0] else routers[::-1]
        monkeypatch.setattr(IndexStore, "forget", refused_first)
        await other.unregister("own")
        await until(lambda: refused and worker not in follower.registry.followers, "the worker is not removed")
        await other.register(registration)
        await until(
            lambda: worker in follower.registry.followers and sum(following()) == 1, "nobody follows the worker"
        )


async def test_a_source_takes_away_its_own_and_nothing_else(url: str) -> None:
    file, cluster = Listed(FILE, A, B), Listed(KUBERNETES, C)
    async with routing(url, file, cluster) as router:
        await router.core.register(Registration(WorkerKey("m", "own"), url="http://127.0.0.1:9"))
        await router.owners_are(a=FILE, b=FILE, c=KUBERNETES, own="register")
        file.show(B)
        await router.owners_are(b=FILE, c=KUBERNETES, own="register")
        cluster.show()
        await router.owners_are(b=FILE, own="register")
        file.show()
        await router.owners_are(own="register")
        # A withdrawal is counted when it is done, a moment after it can be seen.
        async with asyncio.timeout(TIMEOUT_S):
            while router.metric("discovery_changes_total", source=FILE, change="withdrawn") != 2:
                await asyncio.sleep(0.01)


async def test_a_source_that_is_down_changes_nothing_and_says_so(url: str) -> None:
    file = Listed(FILE, A, B)
    async with routing(url, file) as router:
        await router.owners_are(a=FILE, b=FILE)
        assert router.metric("discovery_up", source=FILE) == 1 and router.discovery.health() == []
        file.problem = "the disk is gone"
        file.shown = []
        await router.owners_stay(a=FILE, b=FILE)
        assert router.metric("discovery_up", source=FILE) == 0
        assert router.discovery.health() == ["source file is down: the disk is gone; the 0 workers last known stay"]
        file.problem = ""
        await router.owners_are()


async def test_two_routers_that_see_the_same_do_it_once_and_one_that_is_behind_takes_nothing_away(url: str) -> None:
    first, second = Listed(KUBERNETES, A), Listed(KUBERNETES, A)
    async with routing(url, first) as left, routing(url, second) as right:
        await right.owners_are(a=KUBERNETES)
        first.show(A, B)
        await left.owners_are(a=KUBERNETES, b=KUBERNETES)
        await right.owners_are(a=KUBERNETES, b=KUBERNETES)
        await right.owners_stay(a=KUBERNETES, b=KUBERNETES)
        second.show(A, B)
        first.show(B)
        await left.owners_stay(a=KUBERNETES, b=KUBERNETES)
        second.show(B)
        await left.owners_are(b=KUBERNETES)
        await right.owners_are(b=KUBERNETES)
        # A router whose source is down does not keep a worker that another router no longer sees.
        second.problem = "down"
        first.show(C)
        await right.owners_are(c=KUBERNETES)


async def test_routers_with_lists_of_their_own_keep_both(url: str) -> None:
    async with routing(url, Listed(STATIC, A)) as left:
        await left.owners_are(a=STATIC)
        async with routing(url, Listed(STATIC, B)) as right:
            await right.owners_are(a=STATIC, b=STATIC)
            await left.owners_are(a=STATIC, b=STATIC)
            await left.owners_stay(a=STATIC, b=STATIC)
        await left.owners_are(a=STATIC)


async def test_routers_with_different_sources_do_not_write_in_turns(url: str) -> None:
    first, second = Listed(FILE, A), Listed(FILE, "a=http://127.0.0.1:7")
    async with routing(url, first) as left, routing(url, second) as right:
        async with asyncio.timeout(TIMEOUT_S):
            while not left.discovery.health():
                await asyncio.sleep(0.01)
        assert "another router's file describes it differently" in left.discovery.health()[0]
        written = [
            router.metric("discovery_changes_total", source=FILE, change="registered") for router in (left, right)
        ]
        await asyncio.sleep(STILL_S)
        assert sum(written) <= 3
        assert written == [
            router.metric("discovery_changes_total", source=FILE, change="registered") for router in (left, right)
        ]
        first.show("a=http://127.0.0.1:7")
        async with asyncio.timeout(TIMEOUT_S):
            while left.discovery.health() or right.discovery.health():
                await asyncio.sleep(0.01)
        assert left.url("a") == right.url("a") == "http://127.0.0.1:7"


async def test_workers_that_left_without_a_router_are_removed_at_the_next_start(url: str) -> None:
    async with routing(url, Listed(FILE, A, B)) as router:
        await router.core.register(Registration(WorkerKey("m", "own"), url="http://127.0.0.1:9"))
        await router.owners_are(a=FILE, b=FILE, own="register")
    async with routing(url) as router:
        await router.owners_stay(a=FILE, b=FILE, own="register")
    broken = Listed(FILE)
    broken.problem = "not read yet"
    async with routing(url, broken) as router:
        await router.owners_stay(a=FILE, b=FILE, own="register")
        broken.show(B)
        broken.problem = ""
        await router.owners_are(b=FILE, own="register")


async def test_the_view_of_a_dead_router_keeps_no_worker(url: str) -> None:
    file = Listed(FILE, A, B)
    async with routing(url, file) as router:
        await router.owners_are(a=FILE, b=FILE)
        client = redis.Redis.from_url(url)
        client.hset(keys.CLAIMS, "dead", b'{"workers":{"file":[["a",0]]}}')
        file.show(B)
        await router.owners_are(b=FILE)
        assert client.hget(keys.CLAIMS, "dead") is None
        client.close()


async def test_the_first_of_two_sources_counts_and_the_other_steps_in(url: str) -> None:
    static, cluster = Listed(STATIC, A), Listed(KUBERNETES, "a=http://127.0.0.1:8", B)
    async with routing(url, cluster, static) as router:
        await router.owners_are(a=STATIC, b=KUBERNETES)
        await router.owners_stay(a=STATIC, b=KUBERNETES)
        assert router.metric("discovery_contested", source=KUBERNETES) == 1
        assert router.metric("discovery_conflicts_total", source=KUBERNETES) == 1
        assert router.discovery.health() == [
            "worker a (rank 0) of kubernetes is contested: static registers it, too, and takes precedence"
        ]
        with pytest.raises(Conflict, match="kept by --worker"):
            await router.core.register(Registration(WorkerKey("m", "a"), url="http://127.0.0.1:9"))
        with pytest.raises(Conflict, match="take it out of --worker"):
            await router.core.unregister("a")
        static.show()
        await router.owners_are(a=KUBERNETES, b=KUBERNETES)
        assert router.url("a") == "http://127.0.0.1:8" and router.discovery.health() == []


async def test_a_client_may_drop_what_no_living_router_sees(url: str) -> None:
    async with routing(url, Listed(STATIC, A)) as router:
        await router.owners_are(a=STATIC)
    async with routing(url) as router:
        await router.owners_are(a=STATIC)
        assert await router.core.unregister("a") == 1
        await router.owners_stay()


async def test_a_forbidden_address_is_neither_registered_nor_queried(url: str) -> None:
    engine = EngineHttp()
    source = Listed(FILE, "b=http://10.1.2.3:1")
    source.shown = [candidate_of(listed_worker(f"a={engine.url}"), FILE)]
    async with routing(url, source, allow=("10.0.0.0/8",)) as router:
        await router.owners_stay()
        assert "worker a (rank 0) of file is not registered: url: 127.0.0.1 is not in" in router.discovery.health()[0]
    assert engine.asked == []
    engine.stop()


async def test_an_engine_that_says_otherwise_is_followed_otherwise(url: str) -> None:
    engine = EngineHttp()

    def tell(*ports: int) -> None:
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        sources = {str(rank): {**config, "endpoint": f"tcp://*:{port}"} for rank, port in enumerate(ports)}
        engine.pages["/kv_event_sources"] = msgspec.json.encode(sources)

    engine.pages["/v1/models"] = b'{"data": [{"id": "m"}]}'
    tell(6000)
    source = Listed(FILE)
    source.shown = [candidate_of(listed_worker(f"a={engine.url}"), FILE)]
    async with routing(url, source) as router:
        router.discovery._asker._again_s = router.discovery._asker._retry_s = 0.05

        async def events_are(*ports: int) -> None:
            expected = [(rank, f"tcp://127.0.0.1:{port}") for rank, port in enumerate(ports)]
            async with asyncio.timeout(TIMEOUT_S):
                while sorted((r.worker.dp_rank, r.events) for r in router.core.registrations()) != expected:
                    await asyncio.sleep(0.01)

        await events_are(6000)
        tell(7000, 7001)
        await events_are(7000, 7001)
        engine.stop()
        await asyncio.sleep(STILL_S)
        await events_are(7000, 7001)
        engine.start()
        tell(7000)
        await events_are(7000)
    engine.stop()


async def test_a_pod_that_leaves_is_drained_then_dropped(url: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    pod_options: dict[str, Any] = {"ports": {"http": 1, "kv-events": 2}, "annotations": {"kvrouter/model": "m"}}
    async with FakeCluster() as cluster, aiohttp.ClientSession() as session:
        api = ClusterApi(session, Access(cluster.url, NAMESPACE, tmp_path / "token"), "app=vllm", rng=random.Random(1))
        source = KubernetesSource(api, rng=random.Random(1), retry_s=0.05)
        await cluster.put(pod("e-0", "127.0.0.1", **pod_options), pod("e-1", "127.0.0.1", ready=False, **pod_options))
        async with routing(url, source) as router:
            await router.owners_are(**{"e-0": KUBERNETES})
            await cluster.put(pod("e-1", "127.0.0.1", **pod_options))
            await router.owners_are(**{"e-0": KUBERNETES, "e-1": KUBERNETES})

            async def drains(worker_id: str, expected: bool) -> None:
                async with asyncio.timeout(TIMEOUT_S):
                    while router.core.registry.drains(WorkerKey("m", worker_id)) is not expected:
                        await asyncio.sleep(0.01)

            await cluster.put(pod("e-1", "127.0.0.1", ready=False, **pod_options))
            await drains("e-1", True)
            await cluster.put(pod("e-1", "127.0.0.1", **pod_options))
            await drains("e-1", False)
            await cluster.put(pod("e-0", "127.0.0.1", terminating=True, **pod_options))
            await drains("e-0", True)
            (status,) = [row for row in router.core.statuses() if row.worker_id == "e-0"]
            assert "its pod is terminating" in status.reason and status.source == KUBERNETES
            await router.owners_stay(**{"e-0": KUBERNETES, "e-1": KUBERNETES})
            await cluster.delete("e-0")
            await router.owners_are(**{"e-1": KUBERNETES})
