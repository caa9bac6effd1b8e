# SPDX-License-Identifier: Apache-2.0
"""The laws of leases, heartbeats and the registry; `test_index_contract.py` runs them on every kind of store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from index_support import (
    APPLIED,
    FENCED,
    GPU,
    HOSTILE,
    ME,
    WAIT_S,
    World,
    change,
    held,
)

from kvrouter.router.common.ids import Place, WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.index.commit import Commit, CommitOutcome, Head, Lease
from kvrouter.router.index.leases import Renewal
from kvrouter.router.index.store import IndexStore
from kvrouter.router.index.transactions import Transactions
from kvrouter.router.redis_client.errors import StoreError
from kvrouter.router.redis_client.resp import command


class LeaseLaws:
    def test_a_lease_has_one_holder_and_ends(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            worker = world.worker()
            first = await store.leases.take(worker, "a", 60)
            assert first == Lease("a", 1)
            assert await store.leases.take(worker, "b", 60) is None
            assert await store.leases.renew(worker, Lease("b", 1), 60) is None
            assert not await store.leases.release(worker, Lease("b", 1))
            assert await store.leases.renew(worker, first, 0.05) is not None
            async with asyncio.timeout(WAIT_S):
                while (second := await store.leases.take(worker, "b", 60)) is None:
                    await asyncio.sleep(0.01)
            assert second == Lease("b", 2)
            assert await store.leases.renew(worker, first, 60) is None
            assert await store.leases.release(worker, second)
            assert await store.leases.renew(worker, second, 60) is None
            assert world.stored_keys() == {keys.meta(worker)}

        world.run(body)

    def test_many_leases_are_renewed_together_and_each_answer_is_its_own(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            workers = [world.worker() for _ in range(5)]
            taken = [await store.leases.take(worker, "me", 60) for worker in workers]
            world.raw.delete(keys.lease(workers[1]))
            world.raw.delete(keys.lease(workers[2]))
            assert await store.leases.take(workers[2], "other", 60) == Lease("other", 2)
            offers = [(lease, Renewal.of(worker, 600)) for worker, lease in zip(workers, taken, strict=True) if lease]
            found: dict[int, tuple[bytes | None, Head]] = {}
            for places, batch in store.leases.batch(offers, 2):
                assert len(places) <= 2
                replies = await store.leases.renew_all(batch)
                assert replies is not None
                for place, holder, fields in zip(places, replies[::2], replies[1::2], strict=True):
                    found[place] = holder, Head.of("", *fields)
            assert [found[place][0] for place in range(5)] == [b"me:1", None, b"other:2", b"me:1", b"me:1"]
            assert [found[place][1].lease for place in range(5)] == [1, 1, 2, 1, 1]
            left_ms = [world.raw.pttl(keys.lease(worker)) for worker in workers]
            assert left_ms[1] == -2 and left_ms[2] <= 60_000 and min(left_ms[:1] + left_ms[3:]) > 60_000
            # One that the server refuses makes its request void; each is then renewed by itself.
            world.raw.delete(keys.lease(workers[0]))
            world.raw.rpush(keys.lease(workers[0]), "not ours")
            ((_, batch),) = store.leases.batch([(Lease("me", 1), Renewal.of(workers[0], 60))], 2)
            assert await store.leases.renew_all(batch) is None
            assert store.leases.batch([], 2) == []

        world.run(body)

    def test_a_lease_taken_again_is_another_one(self, world: World) -> None:
        """A process that lost its lease and got it back must not finish what it began under the first."""

        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            for token in ("other", "me"):
                world.raw.delete(keys.lease(worker))
                lease = await store.leases.take(worker, token, 60)
            assert lease == Lease("me", 3)
            before = world.snapshot()
            stale = Commit(worker, "e1", 0, 0, [change(GPU, (1,))])
            assert await store.commit(stale, ME) is FENCED
            assert await store.open_epoch(worker, "e2", ME) is FENCED
            assert await store.note(worker, "e1", ME, {"state": b"live"}) is FENCED
            assert await store.leases.renew(worker, ME, 60) is None
            assert not await store.forget(worker, "other")
            assert world.snapshot() == before
            assert await store.commit(stale, lease) is APPLIED
            assert await store.forget(worker, "me")
            assert not world.stored_keys()

        world.run(body)

    def test_lease_numbers_of_a_process_grow_also_when_the_store_lost_them(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            world.raw.flushall()
            assert await store.leases.take(worker, "me", 60, above=ME.number) == Lease("me", 2)
            assert await store.open_epoch(worker, "e1", ME) is FENCED

        world.run(body)

    def test_a_lease_that_ends_between_check_and_exec_fences(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.leases.renew(worker, ME, 0.2) is not None
            seen: list[bytes | None] = []

            def write(holder: bytes | None, head: Any) -> list[bytes] | CommitOutcome:
                seen.append(holder)
                if holder != ME.value:
                    return FENCED
                time.sleep(0.3)
                return [command("SADD", keys.residents(worker, "e1", GPU), "12345678")]

            before = world.snapshot()
            assert await Transactions(store.servers).run(worker, write) is FENCED
            assert seen == [ME.value, None]
            before.pop(keys.lease(worker), None)
            assert world.snapshot() == before

        world.run(body)

    def test_every_router_sees_the_heartbeats_of_all(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            assert await store.peers.beat("a", b"1") == {b"a": b"1"}
            assert await store.peers.beat("b", b"2") == {b"a": b"1", b"b": b"2"}
            assert await store.peers.beat("a", b"3") == {b"a": b"3", b"b": b"2"} == await store.peers.heartbeats()
            await store.peers.drop_heartbeats(["a"])
            assert await store.peers.heartbeats() == {b"b": b"2"}

        world.run(body)

    def test_heartbeats_go_on_where_another_kind_of_key_stood(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            world.raw.zadd("kvr:routers", {"older": 9e15})
            with pytest.raises(StoreError, match="WRONGTYPE"):
                await store.peers.beat("a", b"1")
            assert await store.peers.beat("a", b"1") == {b"a": b"1"}

        world.run(body)

    def test_a_lost_registry_is_written_back_beside_what_is_new(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            one, two = WorkerKey("m1", "w", 0), WorkerKey("m2", "w", 3)
            await store.registry.put(one, b"a")
            await store.registry.put(two, b"b")
            version = await store.registry.version()
            world.raw.flushall()
            assert await store.registry.version() < version
            await store.registry.put(one, b"newer")
            await store.registry.restore({one: b"a", two: b"b"}, version)
            assert (await store.registry.load())[0] == {one: b"newer", two: b"b"}
            assert await store.registry.version() > version

        world.run(body)

    def test_registrations_come_and_go(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            one, two = WorkerKey("m1", "w", 0), WorkerKey("m2", "w", 3)
            await store.registry.put(one, b"a")
            await store.registry.put(two, b"b")
            await store.registry.put(one, b"c")
            assert (await store.registry.load())[0] == {one: b"c", two: b"b"}
            assert await store.leases.take(one, "me", 60) == ME
            assert await store.open_epoch(one, "e", ME) is APPLIED
            assert await store.commit(Commit(one, "e", 0, 0, [change(GPU, (1,))], [(GPU, 1, 2)]), ME) is APPLIED
            assert await store.registry.drop(one)
            assert not await store.registry.drop(one)
            assert await store.commit(Commit(one, "e", 1, 1), ME) is FENCED
            assert (await store.registry.load())[0] == {two: b"b"}
            assert await store.registry.drop(two)
            assert world.stored_keys() == {keys.REGISTRATIONS}

        world.run(body)

    def test_hostile_names_keep_to_themselves(self, world: World) -> None:
        async def body(store: IndexStore) -> None:
            workers = [WorkerKey(model, name, rank) for model in HOSTILE for name in HOSTILE for rank in (0, 1)]
            for number, worker in enumerate(workers):
                await store.registry.put(worker, b"%d" % number)
            assert (await store.registry.load())[0] == {worker: b"%d" % number for number, worker in enumerate(workers)}
            for number, worker in enumerate(workers[::5]):
                epoch, place = HOSTILE[number % len(HOSTILE)], Place(number, "A:" + worker.model, worker.worker_id)
                assert await store.leases.take(worker, "me", 60) == ME
                assert await store.open_epoch(worker, epoch, ME) is APPLIED
                commit = Commit(worker, epoch, 0, 0, [change(place, (number,))], [(place, number, 2)])
                assert await store.commit(commit, ME) is APPLIED
                image = await store.load(worker)
                assert (image.epoch, held(image.places)) == (epoch, {place: {number}})
                assert await store.load_copies(worker) == {(place, number): 2}
            for worker in workers:
                assert await store.registry.drop(worker)
            assert world.stored_keys() == {keys.REGISTRATIONS}

        world.run(body)
