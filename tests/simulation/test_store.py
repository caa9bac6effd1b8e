# SPDX-License-Identifier: Apache-2.0
"""The store of the simulation under the product's own client: what each fault does to it, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.connection import RESPONSE_TIMEOUT_S, Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store.commit import Commit, CommitOutcome, LeaseValue
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import LogFollower, StoreBack, StoreLost
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.route.load.load_sync import READ_BLOCK_S, RETRY_LAST_S, SILENT_S, LoadSync
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.worker_load import LoadModel
from tests.simulation.store.bare_loop import BareLoop
from tests.simulation.store.store import Former, Store

WORKER = WorkerKey("m", "w")
BEGIN_S = 1_795_000_000.0

Scene = Callable[[Store], Awaitable[Any]]


def play(scene: Scene, seed: int = 1) -> Any:
    """Run a scene on a virtual clock; every wait ends or the loop raises."""
    loop = BareLoop()
    store = Store(lambda: BEGIN_S + loop.time(), random.Random(seed))
    loop.connect = store.create_connection

    async def whole() -> Any:
        try:
            return await scene(store)
        finally:
            store.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(whole())


async def run(servers: Servers, *words: str | bytes | int) -> Any:
    (reply,) = await servers.run("k", command(*words))
    return reply


async def worker_of(index: IndexStore, token: str = "a") -> LeaseValue:
    """Lease WORKER and open its first epoch."""
    taken = await index.leases.take(WORKER, token)
    assert taken is not None
    assert await index.open_epoch(WORKER, "e", taken[0]) is CommitOutcome.APPLIED
    return taken[0]


def follower_of(index: IndexStore) -> LogFollower:
    rng = random.Random(1)
    supervisor = TaskSupervisor(clock=asyncio.get_running_loop().time, rng=rng)
    follower = LogFollower(index.servers, supervisor=supervisor, rng=rng)
    follower.add(WORKER)
    return follower


def test_index_is_written_and_read_and_followed() -> None:
    async def scene(store: Store) -> None:
        index, other = IndexStore(await store.client("a")), IndexStore(await store.client("b"))
        lease = await worker_of(index)
        follower = follower_of(other)
        for seq in range(300):
            assert await index.commit(Commit(WORKER, "e", seq, seq), lease) is CommitOutcome.APPLIED
        seen: list[int] = []
        while len(seen) < 301:
            seen += [item.commit for item in await follower.next() if isinstance(item, LogEntry)]
        assert seen == [*range(1, 302)]
        assert (await other.load(WORKER)).seq == 299
        await follower.close()

    play(scene)


def test_same_seed_gives_the_same_history() -> None:
    async def scene(store: Store) -> list[Any]:
        history: list[Any] = []
        loop = asyncio.get_running_loop()
        store.observe(lambda client, effects: history.append((loop.time(), client, effects)))

        async def writer(name: str) -> None:
            servers = await store.client(name)
            for number in range(30):
                await run(servers, "HSET", "k", name, number)
                await run(servers, "XADD", "log", "*", name, number)

        await asyncio.gather(*(writer(name) for name in ("a", "b", "c")))
        return history

    assert play(scene, 1) == play(scene, 1) != play(scene, 2)


def test_key_expires_on_the_virtual_clock() -> None:
    async def scene(store: Store) -> None:
        leases = IndexStore(await store.client("a")).leases
        assert await leases.renew("t", 1, 5.0) is None
        await asyncio.sleep(4.0)
        assert await leases.renew("t", 2, 5.0) == 1
        await asyncio.sleep(6.0)
        assert await leases.renew("t", 3, 5.0) is None

    play(scene)


def test_observer_sees_who_wrote_and_that_deadlines_are_of_no_client() -> None:
    async def scene(store: Store) -> None:
        seen: list[Any] = []
        store.observe(lambda client, effects: seen.append((client, *effects)))
        servers = await store.client("a")
        await run(servers, "SET", "k", "v", "EX", 1)
        await asyncio.sleep(2.0)
        await run(servers, "GET", "k")
        await run(servers, "INCR", "k")
        store.evict(1)
        deadline = seen[0][1][-1]
        assert seen == [
            ("a", (b"SET", b"k", b"v", b"PXAT", deadline)),
            ("", (b"DEL", b"k")),
            ("a", (b"INCRBY", b"k", b"1")),
            ("", (b"DEL", b"k")),
        ]

    play(scene)


def test_read_that_blocks_ends_with_news_or_in_time() -> None:
    async def scene(store: Store) -> None:
        loop = asyncio.get_running_loop()
        servers = await store.client("a")
        reader = asyncio.create_task(run(servers, "XREAD", "BLOCK", 2_000, "STREAMS", "s", "0-0"))
        assert await reader is None
        assert 2.0 < loop.time() < 2.1
        reader = asyncio.create_task(run(servers, "XREAD", "BLOCK", 2_000, "STREAMS", "s", "0-0"))
        await asyncio.sleep(0.5)
        store.ask("XADD", "s", "*", "f", "v")
        ((name, entries),) = await reader
        assert name == b"s" and entries[0][1] == [b"f", b"v"]
        assert loop.time() < 2.7

    play(scene)


def test_crash_loses_the_last_writes_and_breaks_connections() -> None:
    async def scene(store: Store) -> None:
        servers = await store.client("a")
        index = IndexStore(servers)
        lease = await worker_of(index)
        for seq in range(10):
            await index.commit(Commit(WORKER, "e", seq, seq), lease)
        reader = asyncio.create_task(run(servers, "XREAD", "BLOCK", 5_000, "STREAMS", "nothing", "0-0"))
        await asyncio.sleep(0.1)
        store.crash(3)
        with pytest.raises(StoreUnavailable, match="connection"):
            await reader
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await index.load(WORKER)
        store.start(loading_s=1.0)
        with pytest.raises(StoreUnavailable, match="LOADING"):
            await index.load(WORKER)
        await asyncio.sleep(1.0)
        assert (await index.load(WORKER)).seq == 6
        assert await index.commit(Commit(WORKER, "e", 10, 10), lease) is CommitOutcome.STALE
        assert await index.commit(Commit(WORKER, "e", 7, 7), lease) is CommitOutcome.APPLIED

    play(scene)


def test_silent_crash_shows_after_the_timeout_of_the_client() -> None:
    async def scene(store: Store) -> None:
        servers = await store.client("a")
        store.crash(is_silent=True)
        loop = asyncio.get_running_loop()
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await run(servers, "GET", "k")
        assert loop.time() >= RESPONSE_TIMEOUT_S
        with pytest.raises(StoreUnavailable, match="did not accept"):
            await run(servers, "GET", "k")
        store.start()
        assert await run(servers, "GET", "k") is None

    play(scene)


def test_partition_holds_requests_which_arrive_after_it() -> None:
    async def scene(store: Store) -> None:
        servers, other = await store.client("a"), await store.client("b")
        await run(servers, "SET", "k", "1")
        store.partition("a")
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await run(servers, "SET", "k", "2")
        assert await run(other, "GET", "k") == b"1"
        store.heal("a")
        await asyncio.sleep(1.0)
        assert await run(other, "GET", "k") == b"2"
        assert await run(servers, "GET", "k") == b"2"

    play(scene)


def test_flushall_loses_all_and_the_owner_is_fenced() -> None:
    async def scene(store: Store) -> None:
        index = IndexStore(await store.client("a"))
        lease = await worker_of(index)
        store.flushall()
        assert await index.commit(Commit(WORKER, "e", 0, 0), lease) is CommitOutcome.FENCED

    play(scene)


def test_server_without_memory_refuses_writes_or_evicts() -> None:
    async def scene(store: Store) -> None:
        servers = await store.client("a")
        for number in range(10):
            await run(servers, "SET", number, "v")
        store.fill()
        with pytest.raises(ReplyError, match="OOM"):
            await run(servers, "SET", "k", "v")
        assert await run(servers, "GET", "5") == b"v"
        assert await run(servers, "UNLINK", "5") == 1
        with pytest.raises(ReplyError, match="OOM"):
            await servers.run("k", command("MULTI"), command("SET", "k", "v"), command("EXEC"))
        store.fill("allkeys-lru")
        await run(servers, "SET", "k", "v")
        assert len(store.node.space.values) == 9
        assert await IndexStore(servers).eviction_policies() == {"a.store:6379": "allkeys-lru"}
        store.drain()
        store.fill_disk()
        with pytest.raises(ReplyError, match="MISCONF"):
            await run(servers, "SET", "k", "v")
        store.free_disk()
        await run(servers, "SET", "k", "v")

    play(scene)


@pytest.mark.parametrize("former", list(Former))
def test_failover_loses_what_the_replica_lacked(former: Former) -> None:
    async def scene(store: Store) -> None:
        servers = await store.client("a")
        await run(servers, "SET", "k", "1")
        await run(servers, "SET", "k", "2")
        store.failover(1, former)
        if former is Former.SERVING:
            assert await run(servers, "GET", "k") == b"2"
            await run(servers, "SET", "k", "lost")
            store.end_former()
            await asyncio.sleep(0.1)
        if former is Former.REPLICA:
            with pytest.raises(StoreUnavailable, match="READONLY"):
                await run(servers, "SET", "k", "3")
        else:
            await asyncio.sleep(0.1)
        assert await run(servers, "GET", "k") == b"1"
        await run(servers, "SET", "k", "3")
        assert store.ask("GET", "k") == b"3"

    play(scene)


def test_replica_follows_the_new_primary() -> None:
    async def scene(store: Store) -> None:
        reader = await (await store.client("a")).dedicated("k")
        await reader.run(command("XADD", "s", "1-0", "f", "v"), 1)
        store.failover(0, Former.REPLICA)
        store.ask("XADD", "s", "2-0", "f", "w")
        (((_, entries),),) = await reader.run(command("XREAD", "STREAMS", "s", "1-0"), 1)
        assert [entry_id for entry_id, _ in entries] == [b"2-0"]

    play(scene)


def test_follower_reports_a_lost_store_and_goes_on() -> None:
    async def scene(store: Store) -> None:
        index = IndexStore(await store.client("a"))
        lease = await worker_of(index)
        follower = follower_of(index)
        await follower.next()
        store.stop()
        items = await follower.next()
        assert isinstance(items[0], StoreLost)
        store.resume()
        items = await follower.next()
        assert isinstance(items[0], StoreBack)
        await index.commit(Commit(WORKER, "e", 0, 0), lease)
        assert isinstance((await follower.next())[0], LogEntry)
        await follower.close()

    play(scene)


def test_shared_load_is_known_again_soon_after_a_store_that_died_without_a_word() -> None:
    async def scene(store: Store) -> None:
        loop = asyncio.get_running_loop()
        share = LoadSync(
            LoadModel(LoadTable(), 10_000),
            await store.client("a"),
            process="p",
            clock=loop.time,
            rng=random.Random(1),
            end_here=lambda selection_id, how: False,
            changed=lambda: None,
        )
        share.start()
        await asyncio.sleep(1.0)
        store.stop()
        await asyncio.sleep(READ_BLOCK_S + SILENT_S)
        assert "did not answer" in str(share.problem)
        store.resume()
        await asyncio.sleep(RETRY_LAST_S)
        assert share.problem is None
        await share.stop()

    play(scene)


def test_requests_of_a_closed_connection_are_still_executed() -> None:
    async def scene(store: Store) -> None:
        connection = await Connection.open(("a.store", 6379))
        request = asyncio.create_task(connection.run(command("SET", "k", "v"), 1))
        await asyncio.sleep(0)
        connection.close()
        with pytest.raises(StoreUnavailable):
            await request
        await asyncio.sleep(1.0)
        assert store.ask("GET", "k") == b"v"

    play(scene)


def test_sentinels_name_the_new_primary_and_a_replica_is_refused() -> None:
    async def scene(store: Store) -> None:
        servers = await store.client("a", by_sentinel=True)
        await run(servers, "SET", "k", "1")
        store.failover(0, Former.REPLICA, is_named=False)
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await run(servers, "SET", "k", "2")
        with pytest.raises(StoreUnavailable, match="no primary now"):
            await run(servers, "SET", "k", "2")
        store.name_primary()
        await servers.relearn()
        await run(servers, "SET", "k", "2")
        assert store.ask("GET", "k") == b"2"
        await servers.close()

    play(scene)


def test_node_that_was_cut_off_loses_what_it_took() -> None:
    async def scene(store: Store) -> None:
        left, right = await store.client("a", by_sentinel=True), await store.client("b", by_sentinel=True)
        await run(left, "SET", "k", "both")
        store.failover(0, Former.SERVING)
        await right.relearn()
        await run(right, "SET", "k", "right")
        await run(left, "SET", "k", "left")
        assert (await run(left, "GET", "k"), await run(right, "GET", "k")) == (b"left", b"right")
        store.end_former()
        await asyncio.sleep(0.1)
        with pytest.raises(StoreUnavailable):
            await run(left, "GET", "k")
        assert await run(left, "GET", "k") == b"right"
        await left.close()
        await right.close()

    play(scene)
