# SPDX-License-Identifier: Apache-2.0
"""The laws of the index, on every kind of store: embedded Valkey, Redis with a password and a db, a cluster of three.

The oracle is redis-py reading the raw keys, and plain sets; it shares no code with the store but `keys.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouter.router.index import keys
from kvrouter.router.index.follower import LogEntry, LogFollower, Reload, StoreBack, StoreLost
from kvrouter.router.index.store import Change, Commit, CommitOutcome, IndexStore, StoreError, StoreUnavailable
from kvrouter.router.names import Place, WorkerKey

APPLIED, FENCED, STALE = CommitOutcome.APPLIED, CommitOutcome.FENCED, CommitOutcome.STALE
GPU, CPU, DISK = Place(0, "GPU"), Place(1, "CPU"), Place(None, "STORAGE", "fs:{}\n")
PLACES = (GPU, CPU, DISK)
HOSTILE = ["m}{m", "a/b:c\r\nDEL x", "", "{}", "ä\ud800", "x@1", "w" * 300]
WAIT_S = 15.0
_fresh = itertools.count()

Residency = dict[Place, set[int]]


def hashes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def change(place: Place, added: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> Change:
    return Change(place, hashes(*added), hashes(*removed))


def held(places: dict[Place, np.ndarray]) -> Residency:
    return {place: set(found.tolist()) for place, found in places.items() if len(found)}


def apply(residency: Residency, entry: LogEntry) -> None:
    """What a mirror does with an entry."""
    if entry.cleared or entry.opened_epoch:
        residency.clear()
    for part in entry.changes:
        there = residency.setdefault(part.place, set())
        there |= set(part.added.tolist())
        there -= set(part.removed.tolist())
        if not there:
            del residency[part.place]


class World:
    """A flushed store, and a raw client to look into it."""

    def __init__(self, url: str, raw: Any) -> None:
        self.url = url
        self.raw = raw

    def run(self, body: Callable[[IndexStore], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * WAIT_S):
                store = await IndexStore.open(self.url, **options)
                try:
                    await body(store)
                finally:
                    await store.close()

        asyncio.run(main())

    def keys(self) -> set[str]:
        return {key.decode() for key in self.raw.scan_iter(count=1_000)}

    def snapshot(self) -> dict[str, Any]:
        """Everything that is stored, so that "changes nothing" means nothing at all."""
        readers = {
            b"hash": self.raw.hgetall,
            b"set": self.raw.smembers,
            b"string": self.raw.get,
            b"stream": self.raw.xrange,
        }
        return {key: readers[self.raw.type(key)](key) for key in self.keys()}

    def worker(self) -> WorkerKey:
        return WorkerKey("model", f"w{next(_fresh)}")

    async def owned(self, store: IndexStore, epoch: str = "e1", token: str = "me") -> WorkerKey:
        """A worker with a lease and an epoch."""
        worker = self.worker()
        assert await store.take_lease(worker, token, 60)
        assert await store.open_epoch(worker, epoch, token) is APPLIED
        return worker


async def next_items(follower: LogFollower, count: int) -> list[Any]:
    items: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        while len(items) < count:
            items += await follower.next()
    return items


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit"] * 6 + ["clear", "epoch", "replay", "fenced", "hole", "meta"]),
        st.lists(st.tuples(st.sampled_from(PLACES), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30))), max_size=3),
        st.lists(st.tuples(st.sampled_from(PLACES), st.integers(2**63, 2**63 + 5), st.integers(0, 4)), max_size=3),
        st.integers(0, 3),
    ),
    max_size=14,
)


class IndexContract:
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
                worker, "e1", 5, 7, [change(GPU, (1, 2**64 - 1)), change(DISK, (3,))], [(GPU, 1, 2), (GPU, 3, 1)],
                meta={"state": b"live"},
            )
            assert await store.commit(commit, "me") is APPLIED
            tag = f"kvr:{{model/{worker.worker_id}}}"
            assert world.keys() == {
                f"{tag}:meta", f"{tag}:log", f"{tag}:lease",
                f"{tag}:e1:g0:GPU", f"{tag}:e1:g-:STORAGE:fs%3A%7B%7D%0A", f"{tag}:e1:copies",
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
            assert await store.commit(Commit(worker, "e1", 0, 0, [Change(GPU, many, many[:0])]), "me") is APPLIED
            assert await store.commit(Commit(worker, "e1", 1, 1, [Change(GPU, many[:0], many[:9_000])]), "me") is APPLIED
            members = world.raw.smembers(keys.residents(worker, "e1", GPU))
            assert {len(member) for member in members} == {8}
            assert {int.from_bytes(member, "big") for member in members} == set(many[9_000:].tolist())

        world.run(body)

    def test_a_replayed_commit_changes_nothing(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            first = Commit(worker, "e1", 0, 2, [change(GPU, (1, 2))], [(GPU, 1, 3)])
            assert await store.commit(first, "me") is APPLIED
            assert await store.commit(Commit(worker, "e1", 3, 3, [change(GPU, (), (1,))], [(GPU, 1, 0)]), "me") is APPLIED
            before = world.snapshot()
            overlapping = Commit(worker, "e1", 3, 9, [change(GPU, (1,))])
            cleared = Commit(worker, "e1", 2, 3, cleared=True)
            for replayed in (first, overlapping, cleared):
                assert await store.commit(replayed, "me") is STALE
            assert world.snapshot() == before

        world.run(body)

    def test_a_hole_in_the_seqs_is_refused_unless_all_is_cleared(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 4, 4, [change(GPU, (1,))]), "me") is APPLIED
            before = world.snapshot()
            assert await store.commit(Commit(worker, "e1", 6, 6, [change(GPU, (2,))]), "me") is STALE
            assert world.snapshot() == before
            assert await store.commit(Commit(worker, "e1", 6, 6, [change(GPU, (2,))], cleared=True), "me") is APPLIED
            assert held((await store.load(worker)).places) == {GPU: {2}}

        world.run(body)

    def test_a_fenced_commit_changes_nothing(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), "me") is APPLIED
            before = world.snapshot()
            assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), "other") is FENCED
            assert await store.open_epoch(worker, "e2", "other") is FENCED
            assert await store.put_meta(worker, "e1", "other", {"a": b"b"}) is FENCED
            assert world.snapshot() == before
            assert await store.release_lease(worker, "me")
            assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), "me") is FENCED

        world.run(body)

    def test_a_lease_that_changes_hands_between_check_and_exec_fences(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            seen: list[bytes | None] = []

            def write(lease: bytes | None, head: Any) -> list[bytes] | CommitOutcome:
                seen.append(lease)
                if lease != b"me":
                    return FENCED
                world.raw.set(keys.lease(worker), "thief")
                return [b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$1\r\nx\r\n" % (len(keys.lease(worker)), keys.lease(worker).encode())]

            assert await store._transact(worker, write) is FENCED
            assert seen == [b"me", b"thief"]
            assert world.raw.get(keys.lease(worker)) == b"thief"

        world.run(body)

    def test_another_epochs_commit_is_stale(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.open_epoch(worker, "e2", "me", {"state": b"live"}) is APPLIED
            before = world.snapshot()
            assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), "me") is STALE
            assert await store.open_epoch(worker, "e2", "me") is STALE
            assert await store.put_meta(worker, "e1", "me", {"state": b"x"}) is STALE
            assert world.snapshot() == before

        world.run(body)

    def test_voiding_an_epoch_leaves_no_keys(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            full = [change(place, (1, 2, 3)) for place in PLACES]
            assert await store.commit(Commit(worker, "e1", 0, 0, full, [(CPU, 1, 2)]), "me") is APPLIED
            assert sum(":e1:" in key for key in world.keys()) == 4
            assert await store.open_epoch(worker, "e2", "me") is APPLIED
            assert not any(":e1:" in key for key in world.keys())
            assert await store.commit(Commit(worker, "e2", 0, 0, full, [(CPU, 1, 2)]), "me") is APPLIED
            assert await store.commit(Commit(worker, "e2", 1, 1, cleared=True), "me") is APPLIED
            assert not any(":e2:" in key for key in world.keys())
            assert (await store.load(worker)).seq == 1

        world.run(body)

    def test_copies_are_persisted_only_from_two_on(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            counts = [(GPU, 1, 1), (GPU, 2, 2), (CPU, 2, 7), (DISK, 3, 0)]
            assert await store.commit(Commit(worker, "e1", 0, 0, copies=counts), "me") is APPLIED
            assert await store.load_copies(worker) == {(GPU, 2): 2, (CPU, 2): 7}
            assert world.raw.hlen(keys.copies(worker, "e1")) == 2
            assert await store.commit(Commit(worker, "e1", 1, 1, copies=[(CPU, 2, 1), (GPU, 2, 0)]), "me") is APPLIED
            assert await store.load_copies(worker) == {}
            assert keys.copies(worker, "e1") not in world.keys()

        world.run(body)

    def test_the_stores_own_meta_fields_cannot_be_overwritten(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            with pytest.raises(ValueError, match="seq"):
                await store.put_meta(worker, "e1", "me", {"seq": b"9"})

        world.run(body)

    # -- leases and registry

    def test_a_lease_has_one_holder_and_ends(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = world.worker()
            assert await store.take_lease(worker, "a", 60)
            assert await store.take_lease(worker, "a", 60)
            assert not await store.take_lease(worker, "b", 60)
            assert not await store.renew_lease(worker, "b", 60)
            assert not await store.release_lease(worker, "b")
            assert await store.renew_lease(worker, "a", 0.05)
            async with asyncio.timeout(WAIT_S):
                while not await store.take_lease(worker, "b", 60):
                    await asyncio.sleep(0.01)
            assert not await store.renew_lease(worker, "a", 60)
            assert await store.release_lease(worker, "b")
            assert not await store.renew_lease(worker, "b", 60)
            assert not world.keys()

        world.run(body)

    def test_of_two_racing_owners_only_the_lease_holders_commits_land(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.release_lease(worker, "me")
            landed: dict[int, str] = {}
            refused = 0

            async def owner(token: str) -> None:
                nonlocal refused
                while len(landed) < 200:
                    if not await store.take_lease(worker, token, 60):
                        continue
                    seq = (await store.load(worker)).seq
                    for following in itertools.count(0 if seq is None else seq + 1):
                        commit = Commit(worker, "e1", following, following, [change(GPU, (following,))])
                        if len(landed) >= 200:
                            break
                        if await store.commit(commit, token) is not APPLIED:
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
            assert await store.registrations() == {one: b"c", two: b"b"}
            assert await store.take_lease(one, "me", 60)
            assert await store.open_epoch(one, "e", "me") is APPLIED
            assert await store.commit(Commit(one, "e", 0, 0, [change(GPU, (1,))], [(GPU, 1, 2)]), "me") is APPLIED
            assert await store.drop_registration(one)
            assert not await store.drop_registration(one)
            assert await store.commit(Commit(one, "e", 1, 1), "me") is FENCED
            assert await store.registrations() == {two: b"b"}
            assert await store.drop_registration(two)
            assert not world.keys()

        world.run(body)

    def test_hostile_names_keep_to_themselves(self, world: World):
        async def body(store: IndexStore) -> None:
            workers = [WorkerKey(model, name, rank) for model in HOSTILE for name in HOSTILE for rank in (0, 1)]
            for number, worker in enumerate(workers):
                await store.put_registration(worker, b"%d" % number)
            assert await store.registrations() == {worker: b"%d" % number for number, worker in enumerate(workers)}
            for number, worker in enumerate(workers[::5]):
                epoch, place = HOSTILE[number % len(HOSTILE)], Place(number, "A:" + worker.model, worker.worker_id)
                assert await store.take_lease(worker, "me", 60)
                assert await store.open_epoch(worker, epoch, "me") is APPLIED
                commit = Commit(worker, epoch, 0, 0, [change(place, (number,))], [(place, number, 2)])
                assert await store.commit(commit, "me") is APPLIED
                image = await store.load(worker)
                assert (image.epoch, held(image.places)) == (epoch, {place: {number}})
                assert await store.load_copies(worker) == {(place, number): 2}
            for worker in workers:
                assert await store.drop_registration(worker)
            assert not world.keys()

        world.run(body)

    # -- loading and following

    def test_a_worker_without_an_epoch_loads_as_nothing(self, world: World):
        async def body(store: IndexStore) -> None:
            image = await store.load(world.worker())
            assert (image.epoch, image.seq, image.log_id, image.commits, image.places) == (None, None, "0-0", 0, {})

        world.run(body)

    def test_foreign_members_are_refused(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), "me") is APPLIED
            world.raw.sadd(keys.residents(worker, "e1", GPU), "guest")
            with pytest.raises(StoreError, match="not 8 bytes"):
                await store.load(worker)

        world.run(body)

    @given(steps=STEPS)
    # Three classes run this one test, each on its own store: that is meant.
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    def test_store_and_log_equal_a_brute_force_model(self, world: World, steps: list[Any]):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            residency: Residency = {}
            copies: dict[tuple[Place, int], int] = {}
            epoch, seq, entries = "e1", -1, 1
            for number, (kind, parts, counts, length) in enumerate(steps):
                # Later parts of one place could contradict earlier ones; a commit has each place once.
                parts = list({place: (place, added - removed, removed) for place, added, removed in parts}.values())
                counts = list({(place, block): (place, block, count) for place, block, count in counts}.values())
                changes = [change(place, tuple(added), tuple(removed)) for place, added, removed in parts]
                if kind == "epoch":
                    epoch = f"e{number}:"
                    assert await store.open_epoch(worker, epoch, "me") is APPLIED
                    residency, copies, seq, entries = {}, {}, -1, entries + 1
                    continue
                if kind == "meta":
                    assert await store.put_meta(worker, epoch, "me", {"n": b"%d" % number}) is APPLIED
                    entries += 1
                    continue
                first = {"replay": max(seq - length, 0), "hole": seq + 2}.get(kind, seq + 1)
                commit = Commit(worker, epoch, first, first + length, changes, counts, cleared=kind == "clear")
                outcome = await store.commit(commit, "other" if kind == "fenced" else "me")
                if kind == "fenced":
                    assert outcome is FENCED
                    continue
                if kind in ("replay", "hole") and seq >= 0:
                    assert outcome is STALE
                    continue
                assert outcome is APPLIED
                seq, entries = first + length, entries + 1
                if kind == "clear":
                    residency, copies = {}, {}
                for place, added, removed in parts:
                    residency[place] = (residency.get(place, set()) | added) - removed
                for place, block, count in counts:
                    copies[place, block] = count
            expected = {place: blocks for place, blocks in residency.items() if blocks}
            image = await store.load(worker)
            assert held(image.places) == expected
            assert (image.epoch, image.seq, image.commits) == (epoch, None if seq < 0 else seq, entries)
            kept = {key: count for key, count in copies.items() if count >= 2}
            assert await store.load_copies(worker) == kept
            tag = keys.worker_tag(worker)
            stored = {key for key in world.keys() if key.startswith(f"kvr:{tag}:") and "e" in key[len(f"kvr:{tag}:") :][:1]}
            wanted = {keys.residents(worker, epoch, place) for place in expected}
            assert stored == wanted | ({keys.copies(worker, epoch)} if kept else set())
            follower = LogFollower(store.servers)
            follower.add(worker)
            followed: Residency = {}
            for item in await next_items(follower, entries):
                apply(followed, item)
            await follower.close()
            assert followed == expected

        world.run(body)

    def test_a_follower_sees_each_commit_of_each_worker_once_and_in_order(self, world: World):
        async def body(store: IndexStore) -> None:
            follower = LogFollower(store.servers)
            workers = [await world.owned(store) for _ in range(4)]
            follower.add(workers[0])
            items = await next_items(follower, 1)

            async def write(worker: WorkerKey) -> None:
                for seq in range(30):
                    commit = Commit(worker, "e1", seq, seq, [change(GPU, (seq,))], meta={"n": b"%d" % seq})
                    assert await store.commit(commit, "me") is APPLIED

            writers = asyncio.gather(*map(write, workers))
            for worker in workers[1:]:
                # Added while a read that does not know them is under way.
                await asyncio.sleep(0.005)
                follower.add(worker)
            await writers
            items += await next_items(follower, 4 * 31 - 1)
            for worker in workers:
                own = [item for item in items if item.worker == worker]
                assert [entry.commit for entry in own] == list(range(1, 32))
                assert own[0].opened_epoch
                assert [(entry.first_seq, entry.last_seq) for entry in own[1:]] == [(seq, seq) for seq in range(30)]
                assert [entry.meta for entry in own[1:]] == [{"n": b"%d" % seq} for seq in range(30)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await follower.next()
            await follower.remove(workers[0])
            for worker in workers[:2]:
                assert await store.put_meta(worker, "e1", "me", {"n": b"last"}) is APPLIED
            (last,) = await next_items(follower, 1)
            assert last.worker == workers[1]
            await follower.close()

        world.run(body)

    def test_following_on_from_an_image_converges_while_commits_go_on(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            rng = random.Random(3)
            residency: Residency = {}

            async def write() -> None:
                for seq in range(300):
                    added = set(rng.sample(range(200), 20))
                    removed = set(rng.sample(range(200), 20)) - added
                    place = rng.choice(PLACES)
                    cleared = seq % 70 == 69
                    commit = Commit(worker, "e1", seq, seq, [change(place, tuple(added), tuple(removed))], cleared=cleared)
                    assert await store.commit(commit, "me") is APPLIED
                    if cleared:
                        residency.clear()
                    residency[place] = (residency.get(place, set()) | added) - removed

            writer = asyncio.create_task(write())
            for _ in range(4):
                await asyncio.sleep(0.01)
                follower = LogFollower(store.servers)
                image = await store.load(worker)
                follower.add_image(image)
                followed, seq = held(image.places), image.seq
                async with asyncio.timeout(WAIT_S):
                    while seq != 299:
                        for entry in await follower.next():
                            apply(followed, entry)
                            seq = entry.last_seq
                await follower.close()
                await writer
                assert followed == {place: blocks for place, blocks in residency.items() if blocks}

        world.run(body)

    def test_a_trimmed_log_asks_for_a_reload_and_goes_on_after_it(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            for seq in range(40):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), "me") is APPLIED
            world.raw.xtrim(keys.log(worker), maxlen=5, approximate=False)
            follower = LogFollower(store.servers)
            follower.add(worker)
            (item,) = await next_items(follower, 1)
            assert isinstance(item, Reload)
            assert item.worker == worker
            follower.add_image(await store.load(worker))
            assert await store.commit(Commit(worker, "e1", 40, 40), "me") is APPLIED
            (entry,) = await next_items(follower, 1)
            assert (entry.commit, entry.last_seq) == (42, 40)
            await follower.close()

        world.run(body)

    def test_the_log_is_bounded(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            for seq in range(400):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), "me") is APPLIED
            # A node of a stream holds 100 entries, and MAXLEN ~ drops whole nodes.
            assert 10 <= world.raw.xlen(keys.log(worker)) < 120

        world.run(body, log_entries=10)

    def test_a_worker_dropped_and_registered_again_is_reloaded(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            for seq in range(3):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), "me") is APPLIED
            follower = LogFollower(store.servers)
            follower.add_image(await store.load(worker))
            await asyncio.sleep(0.01)
            await store.drop_registration(worker)
            assert await store.take_lease(worker, "you", 60)
            assert await store.open_epoch(worker, "e1", "you") is APPLIED
            (item,) = await next_items(follower, 1)
            assert isinstance(item, Reload)
            await follower.close()

        world.run(body)

    def test_a_cut_connection_is_told_and_loses_nothing(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            follower = LogFollower(store.servers, rng=random.Random(1))
            follower.add(worker)
            items = await next_items(follower, 1)
            self.kill_clients(world.raw)
            for seq in range(5):
                commit = Commit(worker, "e1", seq, seq, [change(GPU, (seq,))])
                try:
                    assert await store.commit(commit, "me") is APPLIED
                except StoreUnavailable:
                    assert await store.commit(commit, "me") in (APPLIED, STALE)
            items += await next_items(follower, 7)
            entries = [item for item in items if isinstance(item, LogEntry)]
            assert [entry.commit for entry in entries] == [1, 2, 3, 4, 5, 6]
            assert [type(item) for item in items if not isinstance(item, LogEntry)] == [StoreLost, StoreBack]
            assert items.index(next(i for i in items if isinstance(i, StoreBack))) < items.index(entries[1])
            await follower.close()

        world.run(body)

    def kill_clients(self, raw: Any) -> None:
        raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


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
            assert len({store.servers.endpoint_of(keys.meta(worker)) for worker in workers}) == 3

        world.run(body)

    def test_a_slot_that_moves_is_followed_by_owner_and_follower(self, world: World):
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            follower = LogFollower(store.servers)
            follower.add(worker)
            items = await next_items(follower, 1)
            await asyncio.sleep(0.01)
            move_slot(world.raw, keys.meta(worker))
            for seq in range(3):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), "me") is APPLIED
            while sum(isinstance(item, LogEntry) for item in items) < 4:
                items += await next_items(follower, 1)
            assert not any(isinstance(item, Reload) for item in items)
            assert held((await store.load(worker)).places) == {GPU: {0, 1, 2}}
            await follower.close()

        world.run(body)


def move_slot(raw: Any, key: str) -> None:
    """Moves the slot of `key`, with its keys, to another node, as `redis-cli --cluster reshard` does."""
    slot = raw.keyslot(key)
    source = raw.get_node_from_key(key)
    target = next(node for node in raw.get_primaries() if node.name != source.name)
    ids = {node.name: raw.get_redis_connection(node).execute_command("CLUSTER", "MYID").decode() for node in (source, target)}
    at_source, at_target = raw.get_redis_connection(source), raw.get_redis_connection(target)
    at_target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.name])
    at_source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.name])
    moved = at_source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
    at_source.execute_command("MIGRATE", target.host, target.port, "", 0, 5_000, "KEYS", *moved)
    for node in (at_target, at_source):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.name])
