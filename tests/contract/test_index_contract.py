# SPDX-License-Identifier: Apache-2.0
"""The laws of the index, on every kind of store: embedded Valkey, Redis with a password and a db, a cluster of three.

The oracle is redis-py reading the raw keys, and plain sets; it shares no code with the store but `keys.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import numpy as np
import pytest
import redis

from kvrouter.router.common.ids import Place, WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.index.commit import Commit, CommitOutcome, Lease
from kvrouter.router.index.log_entry import LogEntry
from kvrouter.router.index.log_follower import LogFollower, Reload
from kvrouter.router.index.store import IndexStore
from kvrouter.router.ingest.net_changes import ResidencyDelta
from kvrouter.router.redis_client.errors import StoreError, StoreUnavailable
from kvrouter.router.redis_client.resp import command

# pytest's importlib mode leaves sys.path alone.
pytest.register_assert_rewrite("index_support", "index_follow_laws")
from index_follow_laws import FollowLaws  # noqa: E402
from index_support import (  # noqa: E402
    APPLIED,
    CPU,
    DISK,
    FENCED,
    GPU,
    HOSTILE,
    ME,
    OTHER,
    PLACES,
    STALE,
    WAIT_S,
    World,
    change,
    held,
    move_slot,
    next_items,
    supervisor,
)
from tls_redis import TlsRedis  # noqa: E402


class IndexContract(FollowLaws):
    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def world(self, url: str):
        raw = self.client(url)
        raw.flushall()
        yield World(url, raw)
        self.close(raw)

    def client(self, url: str) -> Any:
        return redis.Redis.from_url(url)

    def close(self, raw: Any) -> None:
        raw.close()

    # -- commits

    def test_a_commit_is_stored_as_documented(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            commit = Commit(
                worker,
                "e1",
                5,
                7,
                [change(GPU, (1, 2**64 - 1)), change(DISK, (3,))],
                [(GPU, 1, 2), (GPU, 3, 1)],
                meta={"state": b"live"},
            )
            assert await store.commit(commit, ME) is APPLIED
            tag = f"kvr:{{model/{worker.worker_id}}}"
            assert world.stored_keys() == {
                f"{tag}:meta",
                f"{tag}:log",
                f"{tag}:lease",
                f"{tag}:e1:g0:GPU",
                f"{tag}:e1:g-:STORAGE:fs%3A%7B%7D%0A",
                f"{tag}:e1:copies",
            }
            assert world.raw.smembers(f"{tag}:e1:g0:GPU") == {bytes(7) + b"\x01", b"\xff" * 8}
            assert world.raw.hgetall(f"{tag}:e1:copies") == {b"g0:GPU" + bytes(7) + b"\x01": b"2"}
            assert world.raw.hget(f"{tag}:meta", "seq") == b"7"
            image = await store.load(worker)
            assert (image.epoch, image.seq, image.commits, image.meta) == ("e1", 7, 2, {"state": b"live"})
            assert held(image.places) == {GPU: {1, 2**64 - 1}, DISK: {3}}
            assert await store.committed(worker) == ("e1", 7)

        world.run(body)

    def test_members_are_eight_bytes_also_in_a_commit_of_many_commands(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            many = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            assert await store.commit(Commit(worker, "e1", 0, 0, [ResidencyDelta(GPU, many, many[:0])]), ME) is APPLIED
            assert (
                await store.commit(Commit(worker, "e1", 1, 1, [ResidencyDelta(GPU, many[:0], many[:9_000])]), ME)
                is APPLIED
            )
            members = world.raw.smembers(keys.residents(worker, "e1", GPU))
            assert {len(member) for member in members} == {8}
            assert {int.from_bytes(member, "big") for member in members} == set(many[9_000:].tolist())

        world.run(body)

    def test_a_replayed_commit_changes_nothing(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            first = Commit(worker, "e1", 0, 2, [change(GPU, (1, 2))], [(GPU, 1, 3)])
            assert await store.commit(first, ME) is APPLIED
            assert await store.commit(Commit(worker, "e1", 3, 3, [change(GPU, (), (1,))], [(GPU, 1, 0)]), ME) is APPLIED
            before = world.snapshot()
            overlapping = Commit(worker, "e1", 3, 9, [change(GPU, (1,))])
            earlier = Commit(worker, "e1", 2, 9, [change(GPU, (1,))])
            for replayed in (first, overlapping, earlier):
                assert await store.commit(replayed, ME) is STALE
            assert world.snapshot() == before

        world.run(body)

    def test_a_hole_in_the_seqs_is_refused(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 4, 4, [change(GPU, (1,))]), ME) is APPLIED
            before = world.snapshot()
            assert await store.commit(Commit(worker, "e1", 6, 6, [change(GPU, (2,))]), ME) is STALE
            assert world.snapshot() == before
            assert await store.commit(Commit(worker, "e1", 5, 6, [change(GPU, (2,))]), ME) is APPLIED
            assert held((await store.load(worker)).places) == {GPU: {1, 2}}

        world.run(body)

    def test_a_fenced_commit_changes_nothing(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), ME) is APPLIED
            before = world.snapshot()
            assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), OTHER) is FENCED
            assert await store.open_epoch(worker, "e2", OTHER) is FENCED
            assert world.snapshot() == before
            assert await store.release_lease(worker, ME)
            assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), ME) is FENCED

        world.run(body)

    def test_a_lease_that_changes_hands_between_check_and_exec_fences(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            seen: list[bytes | None] = []

            def write(holder: bytes | None, head: Any) -> list[bytes] | CommitOutcome:
                seen.append(holder)
                if holder != ME.value:
                    return FENCED
                world.raw.set(keys.lease(worker), "thief")
                return [
                    b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$1\r\nx\r\n"
                    % (len(keys.lease(worker)), keys.lease(worker).encode())
                ]

            assert await store._transact(worker, write) is FENCED
            assert seen == [ME.value, b"thief"]
            assert world.raw.get(keys.lease(worker)) == b"thief"

        world.run(body)

    def test_another_epochs_commit_is_stale(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.open_epoch(worker, "e2", ME, {"state": b"live"}) is APPLIED
            before = world.snapshot()
            assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), ME) is STALE
            assert await store.open_epoch(worker, "e2", ME) is STALE
            assert world.snapshot() == before

        world.run(body)

    def test_voiding_an_epoch_leaves_no_keys(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            full = [change(place, (1, 2, 3)) for place in PLACES]
            assert await store.commit(Commit(worker, "e1", 0, 0, full, [(CPU, 1, 2)]), ME) is APPLIED
            assert sum(":e1:" in key for key in world.stored_keys()) == 4
            assert await store.open_epoch(worker, "e2", ME) is APPLIED
            assert not any(":e1:" in key for key in world.stored_keys())
            assert await store.commit(Commit(worker, "e2", 0, 0, full, [(CPU, 1, 2)]), ME) is APPLIED
            emptied = [change(place, (), (1, 2, 3)) for place in PLACES]
            assert await store.commit(Commit(worker, "e2", 1, 1, emptied, [(CPU, 1, 0)]), ME) is APPLIED
            assert not any(":e2:" in key for key in world.stored_keys())
            assert (await store.load(worker)).seq == 1

        world.run(body)

    def test_copies_are_persisted_only_from_two_on(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            counts = [(GPU, 1, 1), (GPU, 2, 2), (CPU, 2, 7), (DISK, 3, 0)]
            assert await store.commit(Commit(worker, "e1", 0, 0, copies=counts), ME) is APPLIED
            assert await store.load_copies(worker) == {(GPU, 2): 2, (CPU, 2): 7}
            assert world.raw.hlen(keys.copies(worker, "e1")) == 2
            assert await store.commit(Commit(worker, "e1", 1, 1, copies=[(CPU, 2, 1), (GPU, 2, 0)]), ME) is APPLIED
            assert await store.load_copies(worker) == {}
            assert keys.copies(worker, "e1") not in world.stored_keys()

        world.run(body)

    def test_the_stores_own_meta_fields_cannot_be_overwritten(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            for field in keys.META_FIELDS:
                with pytest.raises(ValueError, match=field):
                    await store.commit(Commit(worker, "e1", 0, 0, meta={field: b"9"}), ME)
                with pytest.raises(ValueError, match=field):
                    await store.open_epoch(worker, "e2", ME, {field: b"9"})

        world.run(body)

    # -- leases and registry

    def test_a_lease_has_one_holder_and_ends(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = world.worker()
            first = await store.take_lease(worker, "a", 60)
            assert first == Lease("a", 1)
            assert await store.take_lease(worker, "b", 60) is None
            assert await store.renew_lease(worker, Lease("b", 1), 60) is None
            assert not await store.release_lease(worker, Lease("b", 1))
            assert await store.renew_lease(worker, first, 0.05) is not None
            async with asyncio.timeout(WAIT_S):
                while (second := await store.take_lease(worker, "b", 60)) is None:
                    await asyncio.sleep(0.01)
            assert second == Lease("b", 2)
            assert await store.renew_lease(worker, first, 60) is None
            assert await store.release_lease(worker, second)
            assert await store.renew_lease(worker, second, 60) is None
            assert world.stored_keys() == {keys.meta(worker)}

        world.run(body)

    def test_a_lease_taken_again_is_another_one(self, world: World):
        """A process that lost its lease and got it back must not finish what it began under the first."""

        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            for token in ("other", "me"):
                world.raw.delete(keys.lease(worker))
                lease = await store.take_lease(worker, token, 60)
            assert lease == Lease("me", 3)
            before = world.snapshot()
            stale = Commit(worker, "e1", 0, 0, [change(GPU, (1,))])
            assert await store.commit(stale, ME) is FENCED
            assert await store.open_epoch(worker, "e2", ME) is FENCED
            assert await store.note(worker, "e1", ME, {"state": b"live"}) is FENCED
            assert await store.renew_lease(worker, ME, 60) is None
            assert not await store.forget(worker, "other")
            assert world.snapshot() == before
            assert await store.commit(stale, lease) is APPLIED
            assert await store.forget(worker, "me")
            assert not world.stored_keys()

        world.run(body)

    def test_lease_numbers_of_a_process_grow_also_when_the_store_lost_them(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            world.raw.flushall()
            assert await store.take_lease(worker, "me", 60, above=ME.number) == Lease("me", 2)
            assert await store.open_epoch(worker, "e1", ME) is FENCED

        world.run(body)

    def test_a_lease_that_ends_between_check_and_exec_fences(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.renew_lease(worker, ME, 0.2) is not None
            seen: list[bytes | None] = []

            def write(holder: bytes | None, head: Any) -> list[bytes] | CommitOutcome:
                seen.append(holder)
                if holder != ME.value:
                    return FENCED
                time.sleep(0.3)
                return [command("SADD", keys.residents(worker, "e1", GPU), "12345678")]

            before = world.snapshot()
            assert await store._transact(worker, write) is FENCED
            assert seen == [ME.value, None]
            before.pop(keys.lease(worker), None)
            assert world.snapshot() == before

        world.run(body)

    def test_a_note_changes_meta_and_the_log_only(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 4, 5, [change(GPU, (1,))]), ME) is APPLIED
            assert await store.note(worker, "e1", ME, {"state": b"live"}) is APPLIED
            assert await store.note(worker, "e0", ME, {"state": b"down"}) is STALE
            image = await store.load(worker)
            assert (image.epoch, image.seq, image.commits, image.meta) == ("e1", 5, 3, {"state": b"live"})
            follower = LogFollower(store.servers, supervisor=supervisor())
            follower.add(worker)
            *_, note = await next_items(follower, 3)
            await follower.close()
            assert (note.first_seq, note.last_seq, note.opened_epoch, note.changes) == (None, None, False, [])
            assert note.meta == {"state": b"live"}

        world.run(body)

    def test_every_router_sees_the_heartbeats_of_all(self, world: World):
        async def body(store: IndexStore) -> None:
            assert await store.beat("a", b"1") == {b"a": b"1"}
            assert await store.beat("b", b"2") == {b"a": b"1", b"b": b"2"}
            assert await store.beat("a", b"3") == {b"a": b"3", b"b": b"2"} == await store.heartbeats()
            await store.drop_heartbeats(["a"])
            assert await store.heartbeats() == {b"b": b"2"}

        world.run(body)

    def test_heartbeats_go_on_where_another_kind_of_key_stood(self, world: World):
        async def body(store: IndexStore) -> None:
            world.raw.zadd("kvr:routers", {"older": 9e15})
            with pytest.raises(StoreError, match="WRONGTYPE"):
                await store.beat("a", b"1")
            assert await store.beat("a", b"1") == {b"a": b"1"}

        world.run(body)

    def test_a_lost_registry_is_written_back_beside_what_is_new(self, world: World):
        async def body(store: IndexStore) -> None:
            one, two = WorkerKey("m1", "w", 0), WorkerKey("m2", "w", 3)
            await store.put_registration(one, b"a")
            await store.put_registration(two, b"b")
            version = await store.registry_version()
            world.raw.flushall()
            assert await store.registry_version() < version
            await store.put_registration(one, b"newer")
            await store.restore_registrations({one: b"a", two: b"b"}, version)
            assert (await store.registrations())[0] == {one: b"newer", two: b"b"}
            assert await store.registry_version() > version

        world.run(body)

    def test_of_two_racing_owners_only_the_lease_holders_commits_land(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.release_lease(worker, ME)
            leases: set[Lease] = set()
            landed: dict[int, str] = {}
            refused = 0

            async def owner(token: str) -> None:
                nonlocal refused
                while len(landed) < 200:
                    lease = await store.take_lease(worker, token, 60)
                    if lease is None:
                        continue
                    assert lease not in leases
                    leases.add(lease)
                    seq = (await store.load(worker)).seq
                    for following in itertools.count(0 if seq is None else seq + 1):
                        commit = Commit(worker, "e1", following, following, [change(GPU, (following,))])
                        if len(landed) >= 200:
                            break
                        if await store.commit(commit, lease) is not APPLIED:
                            refused += 1
                            break
                        assert following not in landed
                        landed[following] = token
                    # Whoever lost the lease lets the other have it once.
                    while landed and landed[max(landed)] == token and len(landed) < 200:
                        await asyncio.sleep(0)

            async def expiry() -> None:
                ended = 0
                while len(landed) < 200:
                    if len(landed) >= ended + 10:
                        ended = len(landed)
                        world.raw.delete(keys.lease(worker))
                    await asyncio.sleep(0)

            await asyncio.gather(owner("a"), owner("b"), expiry())
            assert refused >= 2
            assert set(landed.values()) == {"a", "b"}
            image = await store.load(worker)
            assert held(image.places) == {GPU: set(landed)}
            assert sorted(landed) == list(range(len(landed)))
            assert image.commits == len(landed) + 1

        world.run(body)

    def test_registrations_come_and_go(self, world: World):
        async def body(store: IndexStore) -> None:
            one, two = WorkerKey("m1", "w", 0), WorkerKey("m2", "w", 3)
            await store.put_registration(one, b"a")
            await store.put_registration(two, b"b")
            await store.put_registration(one, b"c")
            assert (await store.registrations())[0] == {one: b"c", two: b"b"}
            assert await store.take_lease(one, "me", 60) == ME
            assert await store.open_epoch(one, "e", ME) is APPLIED
            assert await store.commit(Commit(one, "e", 0, 0, [change(GPU, (1,))], [(GPU, 1, 2)]), ME) is APPLIED
            assert await store.drop_registration(one)
            assert not await store.drop_registration(one)
            assert await store.commit(Commit(one, "e", 1, 1), ME) is FENCED
            assert (await store.registrations())[0] == {two: b"b"}
            assert await store.drop_registration(two)
            assert world.stored_keys() == {keys.REGISTRATIONS}

        world.run(body)

    def test_hostile_names_keep_to_themselves(self, world: World):
        async def body(store: IndexStore) -> None:
            workers = [WorkerKey(model, name, rank) for model in HOSTILE for name in HOSTILE for rank in (0, 1)]
            for number, worker in enumerate(workers):
                await store.put_registration(worker, b"%d" % number)
            assert (await store.registrations())[0] == {worker: b"%d" % number for number, worker in enumerate(workers)}
            for number, worker in enumerate(workers[::5]):
                epoch, place = HOSTILE[number % len(HOSTILE)], Place(number, "A:" + worker.model, worker.worker_id)
                assert await store.take_lease(worker, "me", 60) == ME
                assert await store.open_epoch(worker, epoch, ME) is APPLIED
                commit = Commit(worker, epoch, 0, 0, [change(place, (number,))], [(place, number, 2)])
                assert await store.commit(commit, ME) is APPLIED
                image = await store.load(worker)
                assert (image.epoch, held(image.places)) == (epoch, {place: {number}})
                assert await store.load_copies(worker) == {(place, number): 2}
            for worker in workers:
                assert await store.drop_registration(worker)
            assert world.stored_keys() == {keys.REGISTRATIONS}

        world.run(body)


class TestEmbedded(IndexContract):
    @pytest.fixture
    def url(self, embedded_url: str) -> str:
        return embedded_url


class TestRedis(IndexContract):
    @pytest.fixture
    def url(self, redis_url: str) -> str:
        return redis_url

    @pytest.mark.parametrize("userinfo", ["", ":wrong%2Fsecret@", "nobody:wrong%2Fsecret@"])
    def test_a_refused_login_says_so_without_the_password(self, url: str, userinfo: str):
        async def main() -> None:
            with pytest.raises(StoreError, match="correct user and password") as raised:
                await IndexStore.open(f"redis://{userinfo}{url.rpartition('@')[2]}")
            assert "secret" not in repr(raised.value)
            assert not isinstance(raised.value, StoreUnavailable)

        asyncio.run(main())

    def test_no_server_is_unavailable(self):
        async def main() -> None:
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await IndexStore.open("redis://127.0.0.1:1")
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await IndexStore.open("unix:///nonexistent/socket")

        asyncio.run(main())

    def test_a_cluster_url_wants_a_cluster(self, url: str):
        async def main() -> None:
            with pytest.raises(StoreError, match="no cluster"):
                await IndexStore.open(url.replace("redis://", "redis+cluster://"))

        asyncio.run(main())


class TestTlsAndAcl(IndexContract):
    """Over TLS, as a user that may do what docs/how-to/hardening.md says, and nothing else."""

    @pytest.fixture
    def url(self, tls_server: TlsRedis) -> str:
        return tls_server.url()

    @pytest.fixture
    def world(self, url: str, tls_server: TlsRedis):
        # The oracle is the administrator.
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
    def test_anything_else_is_refused(self, url: str, command: tuple[str, ...]):
        raw = redis.Redis.from_url(url)
        with pytest.raises(redis.exceptions.NoPermissionError):
            raw.execute_command(*command)
        raw.close()


class TestCluster(IndexContract):
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

    def test_workers_lie_on_all_nodes(self, world: World):
        async def body(store: IndexStore) -> None:
            workers = [await world.owned(store) for _ in range(30)]
            assert len({store.servers.address_of(keys.meta(worker)) for worker in workers}) == 3

        world.run(body)

    def test_a_slot_that_moves_is_followed_by_owner_and_follower(self, world: World):
        async def body(store: IndexStore) -> None:
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

        world.run(body)
