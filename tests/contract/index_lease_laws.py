# SPDX-License-Identifier: Apache-2.0
"""The laws of leases, heartbeats and the registry; `test_index_contract.py` runs them on every kind of store."""

from __future__ import annotations

import asyncio

import pytest

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.index.store import keys, registry
from kvrouter.router.index.store.commit import Commit, CommitOutcome, Head, LeaseValue
from kvrouter.router.index.store.common_keys import PROBES
from kvrouter.router.index.store.leases import LOOKS_PER_REQUEST, LeaseLook, Seen
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.workers.registration import Registration
from tests.contract.index_support import (
    APPLIED,
    FENCED,
    GPU,
    HOSTILE,
    ME,
    WAIT_S,
    World,
    change,
    checkpoint,
    held,
    take,
)


class LeaseLaws:
    """The laws of leases, heartbeats and the registry."""

    async def test_a_worker_has_one_holder_while_its_router_has_a_lease(self, world: World, store: IndexStore) -> None:
        worker = world.worker()
        await store.leases.renew("a", 1, 60)
        first = await take(store, worker, "a")
        assert first == LeaseValue("a", 1)
        assert await take(store, worker, "b") is None
        assert await store.leases.confirm(worker, LeaseValue("b", 1)) is None
        assert not await store.leases.release(worker, LeaseValue("b", 1))
        assert await store.leases.confirm(worker, first) is not None
        await store.leases.renew("a", 2, 0.05)
        async with asyncio.timeout(WAIT_S):
            while (second := await take(store, worker, "b")) is None:
                await asyncio.sleep(0.01)
        assert second == LeaseValue("b", 2)
        # The old lease stays lost when its router comes back.
        await store.leases.renew("a", 3, 60)
        assert await store.leases.confirm(worker, first) is None
        assert await take(store, worker, "a") == LeaseValue("a", 3)
        assert await take(store, worker, "b") is None
        assert await store.leases.release(worker, LeaseValue("a", 3))
        assert await store.leases.confirm(worker, LeaseValue("a", 3)) is None
        assert world.stored_keys() == {keys.meta(worker), keys.router_lease("a")}

    async def test_a_process_that_stood_still_past_its_lease_writes_nothing_once_its_worker_is_taken(
        self, world: World, store: IndexStore
    ) -> None:
        worker = await world.owned(store)
        await store.leases.renew("me", 1, 0.05)
        async with asyncio.timeout(WAIT_S):
            while world.raw.exists(keys.router_lease("me")):
                await asyncio.sleep(0.01)
        # No other router took the worker meanwhile, so the commit is allowed.
        assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), ME) is APPLIED
        assert await take(store, worker, "other") == LeaseValue("other", 2)
        before = world.snapshot()
        assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), ME) is FENCED
        assert await store.open_epoch(worker, "e2", ME) is FENCED
        assert await store.note(worker, "e1", ME, {"state": b"live"}) is FENCED
        assert await store.checkpoint(checkpoint(worker, "e1", 0, {GPU: {1}}), ME) is FENCED
        assert world.snapshot() == before

    async def test_a_lease_that_its_living_router_gave_up_is_taken(self, world: World, store: IndexStore) -> None:
        worker = world.worker()
        await store.leases.renew("a", 1, 60)
        held = await take(store, worker, "a")
        assert held is not None
        asked: list[bytes] = []

        def is_given_up(value: bytes) -> bool:
            asked.append(value)
            return len(asked) > 1

        assert await store.leases.take(worker, "b", is_given_up=is_given_up) is None
        taken = await store.leases.take(worker, "b", is_given_up=is_given_up)
        assert asked == [held.value] * 2
        assert taken is not None and taken[0] == LeaseValue("b", held.number + 1)
        # Its former holder writes nothing.
        assert await store.open_epoch(worker, "e", held) is CommitOutcome.FENCED

    async def test_no_lease_of_a_worker_that_is_registered_again_has_a_number_of_its_former_log(
        self, world: World
    ) -> None:
        worker, now_s = world.worker(), 5.0
        async with world.store(wall_clock=lambda: now_s) as store:
            former = [await take(store, worker, token) for token in ("a", "b")]
            assert former == [LeaseValue("a", 5_000), LeaseValue("b", 5_001)]
            assert await store.forget(worker, "b")
            now_s = 6.0
            assert await take(store, worker, "a") == LeaseValue("a", 6_000)
            # A process that had the lease before keeps its count, also if the clock went back.
            assert await store.forget(worker, "a")
            taken = await store.leases.take(worker, "a", above=7_000)
            assert taken is not None and taken[0].number == 7_001

    async def test_one_of_two_routers_takes_the_worker_of_a_dead_one(
        self, world: World, monkeypatch: pytest.MonkeyPatch, store: IndexStore
    ) -> None:
        worker = world.worker()
        assert await take(store, worker, "dead") == LeaseValue("dead", 1)
        await store.leases.renew("first", 1, 60)
        lives = store.leases._lives

        async def late(token: str) -> bool:
            """Let the other router take the worker between the look and the taking."""
            lives_now = await lives(token)
            monkeypatch.undo()
            assert await take(store, worker, "first") == LeaseValue("first", 2)
            return lives_now

        monkeypatch.setattr(store.leases, "_lives", late)
        assert await take(store, worker, "second") is None
        assert world.raw.get(keys.lease(worker)) == b"first:2"

    async def test_a_router_learns_whether_the_store_has_its_last_renewal(
        self, world: World, store: IndexStore
    ) -> None:
        key = keys.router_lease("a:\n{b}")

        async def renew(count: int) -> int | None:
            return await store.leases.renew("a:\n{b}", count, 60)

        assert await renew(1) is None
        assert await renew(2) == 1
        assert 0 < world.raw.pttl(key) <= 60_000
        saved = world.raw.dump(key)
        assert await renew(3) == 2
        world.raw.restore(key, 1_000, saved, replace=True)
        assert await renew(4) == 2
        world.raw.delete(key)
        assert await renew(5) is None
        world.raw.set(key, "not ours")
        assert await renew(6) is None
        world.raw.delete(key)
        world.raw.rpush(key, "not ours")
        assert await renew(7) is None
        assert await renew(8) == 7

    async def test_a_value_that_no_router_writes_keeps_no_worker(self, world: World, store: IndexStore) -> None:
        worker = world.worker()
        assert await take(store, worker, "a") == LeaseValue("a", 1)
        world.raw.set(keys.router_lease("a"), 1)
        assert await take(store, worker, "b") == LeaseValue("b", 2)

    async def test_many_workers_are_checked_together(self, world: World, store: IndexStore) -> None:
        workers = [world.worker() for _ in range(LOOKS_PER_REQUEST + 5)]
        for worker in workers:
            assert await take(store, worker, "me") == ME
        world.raw.delete(keys.lease(workers[1]))
        world.raw.delete(keys.lease(workers[2]))
        assert await take(store, workers[2], "other") == LeaseValue("other", 2)
        looks = [LeaseLook.of(worker) for worker in workers]
        answers = [seen for seen in await store.leases.look(looks) if isinstance(seen, Seen)]
        holders: list[bytes | None] = [ME.value] * len(workers)
        holders[1:3] = None, b"other:2"
        assert [seen.holder for seen in answers] == holders
        assert [Head.of("", *seen.fields).lease for seen in answers] == [1, 1, 2] + [1] * (len(workers) - 3)
        # A look that the server refuses voids the whole request; each worker is then looked at by itself.
        world.raw.delete(keys.lease(workers[0]))
        world.raw.rpush(keys.lease(workers[0]), "not ours")
        assert await store.leases.look(looks[:1]) == [None]
        assert await store.leases.look([]) == []

    async def test_a_lease_taken_again_is_another_one(self, world: World, store: IndexStore) -> None:
        """Lose a lease and take it again: the process must not finish what it began under the first lease."""
        worker = await world.owned(store)
        for token in ("other", "me"):
            world.raw.delete(keys.lease(worker))
            lease = await take(store, worker, token)
        assert lease == LeaseValue("me", 3)
        before = world.snapshot()
        stale = Commit(worker, "e1", 0, 0, [change(GPU, (1,))])
        assert await store.commit(stale, ME) is FENCED
        assert await store.open_epoch(worker, "e2", ME) is FENCED
        assert await store.note(worker, "e1", ME, {"state": b"live"}) is FENCED
        assert await store.leases.confirm(worker, ME) is None
        assert not await store.forget(worker, "other")
        assert world.snapshot() == before
        assert await store.commit(stale, lease) is APPLIED
        assert await store.forget(worker, "me")
        assert not world.stored_keys()

    async def test_lease_numbers_grow_although_the_store_lost_them(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        world.raw.flushall()
        assert await take(store, worker, "me", above=ME.number) == LeaseValue("me", 2)
        assert await store.open_epoch(worker, "e1", ME) is FENCED

    async def test_every_router_sees_the_heartbeats_of_all(self, world: World, store: IndexStore) -> None:
        assert await store.peers.beat("a", b"1") == {b"a": b"1"}
        assert await store.peers.beat("b", b"2") == {b"a": b"1", b"b": b"2"}
        assert await store.peers.beat("a", b"3") == {b"a": b"3", b"b": b"2"} == await store.peers.heartbeats()
        await store.peers.drop_heartbeats(["a"])
        assert await store.peers.heartbeats() == {b"b": b"2"}

    async def test_heartbeats_replace_a_key_of_another_type(self, world: World, store: IndexStore) -> None:
        world.raw.zadd(keys.ROUTERS, {"older": 9e15})
        with pytest.raises(StoreError, match="WRONGTYPE"):
            await store.peers.beat("a", b"1")
        assert await store.peers.beat("a", b"1") == {b"a": b"1"}

    @pytest.mark.parametrize("key", sorted(PROBES.keys() - {keys.MODELS}))
    async def test_a_common_key_of_another_type_is_replaced(self, world: World, key: str, store: IndexStore) -> None:
        worker = WorkerKey("m", "w", 0)
        await store.registry.put(worker, b"a")
        world.raw.delete(key)
        world.raw.zadd(key, {"older": 9e15})
        assert await store.common_keys.replace_foreign(()) == [key]
        assert world.raw.exists(key) == 0
        assert await store.common_keys.replace_foreign(()) == []
        assert (await store.registry.load())[0] == {worker: b"a"}

    async def test_a_valid_registry_is_left_unchanged(self, world: World, store: IndexStore) -> None:
        await store.registry.put(WorkerKey("m", "w", 0), b"a")
        await store.schemas.look("1")
        await store.peers.beat("a", b"1")
        before = world.snapshot()
        assert await store.common_keys.replace_foreign(()) == []
        assert world.snapshot() == before

    async def test_a_lost_registry_is_written_back_beside_what_is_new(self, world: World, store: IndexStore) -> None:
        first, second = WorkerKey("m1", "w", 0), WorkerKey("m2", "w", 3)
        await store.registry.put(first, b"a")
        await store.registry.put(second, b"b")
        version = await store.registry.version()
        world.raw.flushall()
        assert await store.registry.version() < version
        await store.registry.put(first, b"newer")
        await store.registry.restore({first: b"a", second: b"b"}, version)
        assert (await store.registry.load())[0] == {first: b"newer", second: b"b"}
        assert await store.registry.version() > version

    async def test_a_later_registration_replaces_an_earlier_one(self, world: World, store: IndexStore) -> None:
        worker = WorkerKey("m", "w", 0)
        first, second, third = (store.registry.value(Registration(worker, lora_name=name)) for name in "abc")
        await store.registry.put(worker, second)
        as_late = registry.encode(registry.StoredRegistration(worker, lora_name="d", revision=2))
        for known, left in ((first, second), (as_late, second), (third, third), (second, third)):
            version = await store.registry.version()
            await store.registry.restore({worker: known}, 0)
            assert await store.registry.stored(worker) == left
            assert await store.registry.version() == version + 1
        # A router of an earlier version wrote this, perhaps since.
        unnumbered = registry.encode(Registration(worker))
        await store.registry.put(worker, unnumbered)
        await store.registry.restore({worker: third}, 0)
        assert await store.registry.stored(worker) == unnumbered

    async def test_a_registration_is_later_than_all_that_were_read(self, world: World, store: IndexStore) -> None:
        worker = WorkerKey("m", "w", 0)
        for number, revision in enumerate((10**15, 10**16)):
            raw = registry.encode(registry.StoredRegistration(worker, revision=revision))
            await store.registry.put(worker, raw)
            await (store.registry.load() if number else store.registry.stored(worker))
            assert registry.is_outdated(raw, store.registry.value(Registration(worker)))

    async def test_registrations_come_and_go(self, world: World, store: IndexStore) -> None:
        first, second = WorkerKey("m1", "w", 0), WorkerKey("m2", "w", 3)
        await store.registry.put(first, b"a")
        await store.registry.put(second, b"b")
        await store.registry.put(first, b"c")
        assert (await store.registry.load())[0] == {first: b"c", second: b"b"}
        assert await take(store, first, "me") == ME
        assert await store.open_epoch(first, "e", ME) is APPLIED
        assert await store.commit(Commit(first, "e", 0, 0, [change(GPU, (1,))], [(GPU, 1, 2)]), ME) is APPLIED
        assert await store.registry.drop(first)
        assert not await store.registry.drop(first)
        assert await store.commit(Commit(first, "e", 1, 1), ME) is FENCED
        assert (await store.registry.load())[0] == {second: b"b"}
        assert await store.registry.drop(second)
        assert world.stored_keys() == {keys.REGISTRATIONS}

    async def test_hostile_names_affect_no_other_worker(self, world: World, store: IndexStore) -> None:
        workers = [WorkerKey(model, name, rank) for model in HOSTILE for name in HOSTILE for rank in (0, 1)]
        for number, worker in enumerate(workers):
            await store.registry.put(worker, b"%d" % number)
        assert (await store.registry.load())[0] == {worker: b"%d" % number for number, worker in enumerate(workers)}
        for number, worker in enumerate(workers[::5]):
            epoch, place = HOSTILE[number % len(HOSTILE)], Place(number, "A:" + worker.model, worker.worker_id)
            assert await take(store, worker, "me") == ME
            assert await store.open_epoch(worker, epoch, ME) is APPLIED
            commit = Commit(worker, epoch, 0, 0, [change(place, (number,))], [(place, number, 2)])
            assert await store.commit(commit, ME) is APPLIED
            image = await store.load(worker)
            assert (image.epoch, held(image.places)) == (epoch, {place: {number}})
            assert await store.load_copies(worker) == {(place, number): 2}
        for worker in workers:
            assert await store.registry.drop(worker)
        assert world.stored_keys() == {keys.REGISTRATIONS}
