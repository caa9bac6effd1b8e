# SPDX-License-Identifier: Apache-2.0
"""The laws of the index, on every kind of store: embedded Valkey, Redis with a password and a db, a cluster of three.

The oracle is redis-py reading the raw keys, and plain sets; it shares no code with the store but `keys.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import redis

from kvrouter.router.base.redis_client.errors import StoreError, StoreUnavailable
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Commit
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import LogFollower, Reload
from kvrouter.router.index.store.store import IndexStore
from tests.contract.index_checkpoint_laws import CheckpointLaws
from tests.contract.index_commit_laws import CommitLaws
from tests.contract.index_follow_laws import FollowLaws, ScanLaws
from tests.contract.index_lease_laws import LeaseLaws
from tests.contract.index_support import (
    APPLIED,
    GPU,
    ME,
    World,
    change,
    held,
    move_slot,
    next_items,
    supervisor,
)
from tests.support.tls_redis import TlsRedis


class IndexContract(CommitLaws, CheckpointLaws, LeaseLaws, FollowLaws):
    """All laws of the index, for the store at `url`."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def world(self, url: str) -> Iterator[World]:
        raw = self.client(url)
        raw.flushall()
        yield World(url, raw)
        self.close(raw)

    @pytest.fixture
    def store(self, world: World) -> AbstractAsyncContextManager[IndexStore]:
        return world.store()

    def client(self, url: str) -> Any:
        return redis.Redis.from_url(url)

    def close(self, raw: Any) -> None:
        raw.close()


class TestEmbedded(IndexContract, ScanLaws):
    @pytest.fixture
    def url(self, embedded_url: str) -> str:
        return embedded_url


class TestRedis(IndexContract, ScanLaws):
    @pytest.fixture
    def url(self, redis_url: str) -> str:
        return redis_url

    @pytest.mark.parametrize("userinfo", ["", ":wrong%2Fsecret@", "nobody:wrong%2Fsecret@"])
    async def test_a_refused_login_says_so_without_the_password(self, url: str, userinfo: str) -> None:
        with pytest.raises(StoreError, match="correct user and password") as raised:
            await IndexStore.open(f"redis://{userinfo}{url.rpartition('@')[2]}")
        assert "secret" not in repr(raised.value)
        assert not isinstance(raised.value, StoreUnavailable)

    async def test_no_server_is_unavailable(self) -> None:
        with pytest.raises(StoreUnavailable, match=r"cannot be reached: .*[^.]\Z"):
            await IndexStore.open("redis://127.0.0.1:1")
        with pytest.raises(StoreUnavailable, match=r"cannot be reached: .*[^.]\Z"):
            await IndexStore.open("unix:///nonexistent/socket")

    async def test_a_cluster_url_wants_a_cluster(self, url: str) -> None:
        with pytest.raises(StoreError, match="no cluster"):
            await IndexStore.open(url.replace("redis://", "redis+cluster://"))


class TestTlsAndAcl(IndexContract):
    """A store over TLS, for a user with only the permissions that docs/how-to/hardening.md names."""

    @pytest.fixture
    def url(self, tls_server: TlsRedis) -> str:
        return tls_server.url()

    @pytest.fixture
    def world(self, url: str, tls_server: TlsRedis) -> Iterator[World]:
        # The oracle reads as the administrator.
        raw = tls_server.admin()
        raw.flushall()
        raw.acl_log_reset()
        yield World(url, raw)
        assert raw.acl_log() == []
        raw.close()

    @pytest.mark.parametrize(
        "command",
        [
            ("GET", "other"),
            ("SET", "kvr", "1"),
            ("KEYS", "kvr:*"),
            ("SCAN", "0"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "requirepass"),
            ("ACL", "LIST"),
            ("EVAL", "return 1", "0"),
            ("CLUSTER", "RESET"),
            ("PUBLISH", "kvr:x", "1"),
            ("SHUTDOWN",),
        ],
    )
    def test_commands_outside_the_acl_are_refused(self, url: str, command: tuple[str, ...]) -> None:
        raw = redis.Redis.from_url(url)
        with pytest.raises(redis.exceptions.NoPermissionError):
            raw.execute_command(*command)
        raw.close()


class TestCluster(IndexContract, ScanLaws):
    @pytest.fixture
    def url(self, cluster_url: str) -> str:
        return cluster_url

    def client(self, url: str) -> Any:
        return redis.RedisCluster.from_url(url)

    def close(self, raw: Any) -> None:
        raw.disconnect_connection_pools()
        raw.close()

    def kill_clients(self, raw: Any) -> None:
        for node in raw.get_primaries():
            raw.get_redis_connection(node).execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def test_workers_are_spread_over_all_nodes(self, world: World, store: IndexStore) -> None:
        workers = [await world.owned(store) for _ in range(30)]
        assert len({store.servers.address_of(keys.meta(worker)) for worker in workers}) == 3

    async def test_a_slot_that_moves_is_followed_by_owner_and_follower(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        follower = LogFollower(store.servers, supervisor=supervisor())
        follower.add(worker)
        items = await next_items(follower, 1)
        await asyncio.sleep(0.01)
        move_slot(world.raw, keys.meta(worker))
        for seq in range(3):
            assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED
        while sum(isinstance(item, LogEntry) for item in items) < 4:
            items += await next_items(follower, 1)
        assert not any(isinstance(item, Reload) for item in items)
        assert held((await store.load(worker)).places) == {GPU: {0, 1, 2}}
        await follower.close()
