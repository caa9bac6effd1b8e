# SPDX-License-Identifier: Apache-2.0
"""The laws of loading and following; `test_index_contract.py` runs them on every kind of store."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreUnavailable
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys
from kvrouter.router.index.store import store as stores
from kvrouter.router.index.store.commit import Commit
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import ENTRIES_PER_READ, LogFollower, Reload, StoreBack, StoreLost
from kvrouter.router.index.store.store import IndexStore
from tests.contract.index_support import (
    APPLIED,
    FENCED,
    GPU,
    HOSTILE,
    ME,
    OTHER,
    PLACES,
    STALE,
    WAIT_S,
    Residency,
    World,
    apply,
    change,
    checkpoint,
    hashes,
    held,
    next_items,
    supervisor,
    take,
)
from tests.support.examples import examples

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit"] * 6 + ["clear", "epoch", "replay", "fenced", "hole"] + ["checkpoint"] * 3),
        st.lists(
            st.tuples(st.sampled_from(PLACES), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30))), max_size=3
        ),
        st.lists(st.tuples(st.sampled_from(PLACES), st.integers(2**63, 2**63 + 5), st.integers(0, 4)), max_size=3),
        st.integers(0, 3),
    ),
    max_size=14,
)


SPOILS: dict[str, Callable[[Any, WorkerKey], object]] = {
    "log gone": lambda raw, worker: raw.delete(keys.log(worker)),
    "log trimmed": lambda raw, worker: raw.xtrim(keys.log(worker), maxlen=2, approximate=False),
    "last entry gone": lambda raw, worker: raw.xdel(keys.log(worker), raw.xrevrange(keys.log(worker), count=1)[0][0]),
    "one entry gone": lambda raw, worker: raw.xdel(keys.log(worker), raw.xrevrange(keys.log(worker), count=2)[1][0]),
    "an entry replaced": lambda raw, worker: (
        raw.xdel(keys.log(worker), raw.xrevrange(keys.log(worker), count=1)[0][0]),
        raw.xadd(keys.log(worker), {"kind": "junk"}),
    ),
    "checkpoint gone": lambda raw, worker: raw.delete(keys.residents(worker, "e1", GPU)),
    "checkpoint cut": lambda raw, worker: raw.set(keys.residents(worker, "e1", GPU), bytes(8)),
    "checkpoint longer": lambda raw, worker: raw.append(keys.residents(worker, "e1", GPU), b"x"),
    "number of the checkpoint": lambda raw, worker: raw.hset(keys.meta(worker), "checkpoint", "9"),
}


class FollowLaws:
    """The laws of loading and following."""

    def kill_clients(self, raw: Any) -> None:
        raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def test_a_worker_without_an_epoch_loads_as_nothing(self, world: World, store: IndexStore) -> None:
        image = await store.load(world.worker())
        assert (image.epoch, image.seq, image.log_id, image.commits, image.places) == (None, None, "0-0", 0, {})

    @given(steps=STEPS)
    # Three classes run this test, each on its own store, so Hypothesis' check for differing executors is off.
    @settings(
        max_examples=examples(40),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    def test_store_and_log_equal_a_brute_force_model(self, world: World, steps: list[Any]) -> None:
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            residency: Residency = {}
            copies: dict[tuple[Place, int], int] = {}
            meta: dict[str, bytes] = {}
            epoch, seq, entries = "e1", -1, 1
            stored_places: set[Place] = set()
            for number, (kind, parts, counts, length) in enumerate(steps):
                # Later parts of one place could contradict earlier ones, so a commit has each place once.
                parts = list({place: (place, added - removed, removed) for place, added, removed in parts}.values())
                counts = list({(place, block): (place, block, count) for place, block, count in counts}.values())
                changes = [change(place, tuple(added), tuple(removed)) for place, added, removed in parts]
                if kind == "epoch":
                    epoch, meta = f"e{number}:", {"opened": b"%d" % number}
                    assert await store.open_epoch(worker, epoch, ME, meta) is APPLIED
                    residency, copies, seq, entries, stored_places = {}, {}, -1, entries + 1, set()
                    continue
                if kind == "checkpoint":
                    before = world.snapshot()
                    checkpoint_now = checkpoint(worker, epoch, seq, residency)
                    assert await store.checkpoint(checkpoint_now, OTHER) is FENCED
                    late = msgspec.structs.replace(checkpoint_now, seq=seq + 1)
                    assert await store.checkpoint(late, ME) is STALE
                    assert world.snapshot() == before
                    if seq >= 0:
                        assert await store.checkpoint(checkpoint_now, ME) is APPLIED
                        stored_places = {place for place, blocks in residency.items() if blocks}
                        assert held((await store.load(worker)).places) == {p: residency[p] for p in stored_places}
                    continue
                if kind == "clear":
                    # Ingest reports that an engine dropped everything as removals of all its blocks.
                    parts = [(place, set(), blocks) for place, blocks in residency.items()]
                    counts = [(place, block, 0) for place, block in copies]
                    changes = [change(place, (), tuple(removed)) for place, _, removed in parts]
                first = {"replay": max(seq - length, 0), "hole": seq + 2}.get(kind, seq + 1)
                news = {f"n{length}": b"%d" % number} if length else {}
                commit = Commit(worker, epoch, first, first + length, changes, counts, news)
                outcome = await store.commit(commit, OTHER if kind == "fenced" else ME)
                if kind == "fenced":
                    assert outcome is FENCED
                    continue
                if kind in ("replay", "hole") and seq >= 0:
                    assert outcome is STALE
                    continue
                assert outcome is APPLIED
                seq, entries, meta = first + length, entries + 1, meta | news
                for place, added, removed in parts:
                    residency[place] = (residency.get(place, set()) | added) - removed
                for place, block, count in counts:
                    copies[place, block] = count
            expected = {place: blocks for place, blocks in residency.items() if blocks}
            image = await store.load(worker)
            assert held(image.places) == expected
            assert (image.epoch, image.seq, image.commits) == (epoch, None if seq < 0 else seq, entries)
            assert image.meta == meta
            kept = {key: count for key, count in copies.items() if count >= 2}
            assert await store.load_copies(worker) == kept
            tag = keys.worker_tag(worker)
            stored = {
                key
                for key in world.stored_keys()
                if key.startswith(f"{keys.PREFIX}{tag}:") and "e" in key[len(f"{keys.PREFIX}{tag}:") :][:1]
            }
            wanted = {keys.residents(worker, epoch, place) for place in stored_places}
            assert stored == wanted | {keys.copies(worker, epoch)}
            follower = LogFollower(store.servers, supervisor=supervisor())
            follower.add(worker)
            followed: Residency = {}
            for item in await next_items(follower, entries):
                apply(followed, item)
            await follower.close()
            assert followed == expected

        world.run(body)

    async def test_a_follower_sees_each_commit_once_and_in_order(self, world: World, store: IndexStore) -> None:
        follower = LogFollower(store.servers, supervisor=supervisor())
        workers = [await world.owned(store) for _ in range(4)]
        follower.add(workers[0])
        items = await next_items(follower, 1)

        async def write(worker: WorkerKey) -> None:
            for seq in range(30):
                commit = Commit(worker, "e1", seq, seq, [change(GPU, (seq,))], meta={"n": b"%d" % seq})
                assert await store.commit(commit, ME) is APPLIED

        writers = asyncio.gather(*map(write, workers))
        for worker in workers[1:]:
            # The worker is added while a read of the other workers is under way.
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
            assert await store.commit(Commit(worker, "e1", 30, 30), ME) is APPLIED
        (last,) = await next_items(follower, 1)
        assert last.worker == workers[1]
        await follower.close()

    async def test_following_from_an_image_converges(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        rng = random.Random(3)
        residency: Residency = {}
        epoch = "e1"

        async def write() -> None:
            nonlocal epoch
            for seq in range(300):
                if seq % 70 == 69:
                    epoch = f"e{seq}"
                    assert await store.open_epoch(worker, epoch, ME) is APPLIED
                    residency.clear()
                added = set(rng.sample(range(200), 20))
                removed = set(rng.sample(range(200), 20)) - added
                place = rng.choice(PLACES)
                commit = Commit(worker, epoch, seq, seq, [change(place, tuple(added), tuple(removed))])
                assert await store.commit(commit, ME) is APPLIED
                residency[place] = (residency.get(place, set()) | added) - removed
                if seq % 13 == 12:
                    assert await store.checkpoint(checkpoint(worker, epoch, seq, residency), ME) is APPLIED

        writer = asyncio.create_task(write())
        for _ in range(4):
            await asyncio.sleep(0.01)
            follower = LogFollower(store.servers, supervisor=supervisor())
            image = await store.load(worker)
            follower.add_image(image)
            followed, seq = held(image.places), image.seq
            async with asyncio.timeout(WAIT_S):
                while seq != 299:
                    for entry in await follower.next():
                        assert isinstance(entry, LogEntry)
                        apply(followed, entry)
                        seq = entry.last_seq
            await follower.close()
            await writer
            assert followed == {place: blocks for place, blocks in residency.items() if blocks}

    async def test_an_entry_is_of_the_backlog_until_the_log_was_read_to_its_end(
        self, world: World, store: IndexStore
    ) -> None:
        worker = await world.owned(store)
        seqs = iter(range(100))

        async def write(count: int) -> None:
            for seq in itertools.islice(seqs, count):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED

        async def read(count: int) -> list[bool]:
            entries: list[LogEntry] = []
            async with asyncio.timeout(WAIT_S):
                while len(entries) < count:
                    entries += [item for item in await follower.next() if isinstance(item, LogEntry)]
            return [entry.is_backlog for entry in entries]

        await write(2 * ENTRIES_PER_READ)
        follower = LogFollower(store.servers, supervisor=supervisor())
        follower.add(worker)
        assert all(await read(2 * ENTRIES_PER_READ + 1))
        for _ in range(3):
            await write(1)
            assert await read(1) == [False]
        # Entries that a lost connection would have brought may wait for long.
        for reader in follower._readers.values():
            assert reader._connection is not None
            reader._connection.close()
        await write(1)
        assert await read(1) == [True]
        await write(1)
        assert await read(1) == [False]
        await follower.close()

    async def test_a_trimmed_log_asks_for_a_reload_and_continues_after_it(
        self, world: World, store: IndexStore
    ) -> None:
        worker = await world.owned(store)
        for seq in range(40):
            assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED
        assert await store.checkpoint(checkpoint(worker, "e1", 39, {GPU: range(40)}), ME) is APPLIED
        world.raw.xtrim(keys.log(worker), maxlen=5, approximate=False)
        follower = LogFollower(store.servers, supervisor=supervisor())
        follower.add(worker)
        (item,) = await next_items(follower, 1)
        assert isinstance(item, Reload)
        assert item.worker == worker
        follower.add_image(await store.load(worker))
        assert await store.commit(Commit(worker, "e1", 40, 40), ME) is APPLIED
        (entry,) = await next_items(follower, 1)
        assert (entry.commit, entry.last_seq) == (42, 40)
        await follower.close()

    @pytest.mark.parametrize(("field", "other"), [("epoch", "e0"), ("seq", 7)])
    async def test_a_log_with_as_many_other_entries_is_reloaded(
        self, world: World, store: IndexStore, field: str, other: object
    ) -> None:
        worker = await world.owned(store)
        for seq in range(3):
            assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED
        follower = LogFollower(store.servers, supervisor=supervisor())
        # As read from a replica that was promoted for some time.
        follower.add_image(msgspec.structs.replace(await store.load(worker), **{field: other}))
        assert await store.commit(Commit(worker, "e1", 3, 3, [change(GPU, (3,))]), ME) is APPLIED
        (item,) = await next_items(follower, 1)
        assert isinstance(item, Reload)
        follower.add_image(await store.load(worker))
        assert await store.commit(Commit(worker, "e1", 4, 4), ME) is APPLIED
        (entry,) = await next_items(follower, 1)
        assert entry.last_seq == 4
        await follower.close()

    async def test_a_damaged_log_or_checkpoint_is_refused(self, world: World, store: IndexStore) -> None:
        for name, spoil in SPOILS.items():
            print(name)
            worker = await world.owned(store)
            assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1, 2))]), ME) is APPLIED
            assert await store.checkpoint(checkpoint(worker, "e1", 0, {GPU: (1, 2)}), ME) is APPLIED
            for seq in range(1, 4):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (9 + seq,))]), ME) is APPLIED
            spoil(world.raw, worker)
            with pytest.raises(StoredValueError, match="Redis holds what no router writes"):
                await store.load(worker)
            # The lease holder reads the report with its next renewal, and opens a new epoch.
            await store.report_unreadable(worker, "bad")
            with pytest.raises(StoredValueError):
                await store.commit(Commit(worker, "e1", 4, 4), ME)
            assert await store.open_epoch(worker, "e2", ME) is APPLIED
            assert held((await store.load(worker)).places) == {}
            assert not any(f"/{worker.worker_id}}}:e1:" in key for key in world.stored_keys())

    async def test_foreign_entries_are_passed_over(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        for seq in range(3):
            assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED
            world.raw.xadd(keys.log(worker), {"kind": "junk"})
        assert held((await store.load(worker)).places) == {GPU: {0, 1, 2}}

    async def test_the_log_is_bounded(self, world: World) -> None:
        async with world.store(log_entries=10) as store:
            worker = await world.owned(store)
            for seq in range(400):
                assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED
            # Entries that the checkpoint lacks are not trimmed.
            assert world.raw.xlen(keys.log(worker)) >= 400
            assert await store.checkpoint(checkpoint(worker, "e1", 399, {GPU: range(400)}), ME) is APPLIED
            assert await store.commit(Commit(worker, "e1", 400, 400), ME) is APPLIED
            # A node of a stream holds 100 entries, and MAXLEN ~ drops whole nodes.
            assert 10 <= world.raw.xlen(keys.log(worker)) < 120
            assert held((await store.load(worker)).places) == {GPU: {*range(400)}}

    async def test_the_log_of_large_commits_is_bounded_in_bytes(
        self, world: World, monkeypatch: pytest.MonkeyPatch, store: IndexStore
    ) -> None:
        monkeypatch.setattr(stores, "LOG_BYTES", 100_000)
        worker = await world.owned(store)
        for seq in range(30):
            large = ResidencyDelta(GPU, np.arange(2_000 * seq, 2_000 * seq + 2_000, dtype=np.uint64), hashes())
            assert await store.commit(Commit(worker, "e1", seq, seq, [large]), ME) is APPLIED
            blocks = {GPU: range(2_000 * seq + 2_000)}
            assert await store.checkpoint(checkpoint(worker, "e1", seq, blocks), ME) is APPLIED
        # Each entry has 16 KB, and a stream's node of that size holds one entry.
        assert world.raw.xlen(keys.log(worker)) == 6
        huge = ResidencyDelta(GPU, np.arange(10**6, 10**6 + 20_000, dtype=np.uint64), hashes())
        assert await store.commit(Commit(worker, "e1", 30, 30, [huge]), ME) is APPLIED
        assert world.raw.xlen(keys.log(worker)) == 1

    async def test_a_worker_dropped_and_registered_again_is_reloaded(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        for seq in range(3):
            assert await store.commit(Commit(worker, "e1", seq, seq, [change(GPU, (seq,))]), ME) is APPLIED
        follower = LogFollower(store.servers, supervisor=supervisor())
        follower.add_image(await store.load(worker))
        await asyncio.sleep(0.01)
        await store.registry.drop(worker)
        lease = await take(store, worker, "you")
        assert lease is not None
        assert await store.open_epoch(worker, "e1", lease) is APPLIED
        (item,) = await next_items(follower, 1)
        assert isinstance(item, Reload)
        await follower.close()

    async def test_a_cut_connection_is_reported_and_loses_nothing(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        follower = LogFollower(store.servers, supervisor=supervisor(), rng=random.Random(1))
        follower.add(worker)
        items = await next_items(follower, 1)
        self.kill_clients(world.raw)
        for seq in range(5):
            commit = Commit(worker, "e1", seq, seq, [change(GPU, (seq,))])
            try:
                assert await store.commit(commit, ME) is APPLIED
            except StoreUnavailable:
                assert await store.commit(commit, ME) in (APPLIED, STALE)
        items += await next_items(follower, 7)
        entries = [item for item in items if isinstance(item, LogEntry)]
        assert [entry.commit for entry in entries] == [1, 2, 3, 4, 5, 6]
        assert [type(item) for item in items if not isinstance(item, LogEntry)] == [StoreLost, StoreBack]
        assert items.index(next(i for i in items if isinstance(i, StoreBack))) < items.index(entries[1])
        await follower.close()


class ScanLaws:
    """The laws of a store whose user may list the names of all keys."""

    async def test_models_are_found_by_their_registrations(self, world: World, store: IndexStore) -> None:
        stored = {WorkerKey(model, "w", 0): b"%d" % number for number, model in enumerate(HOSTILE)}
        for worker, registration in stored.items():
            await store.registry.put(worker, registration)
        await world.owned(store)
        world.raw.delete(keys.MODELS)
        world.raw.set(keys.MODELS, b"x")
        assert await store.common_keys.replace_foreign(["known"]) == [keys.MODELS]
        assert (await store.registry.load())[0] == stored
        assert keys.model_member("known").encode() in world.raw.smembers(keys.MODELS)

    async def test_keys_that_nothing_names_are_found_and_voided(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        tag = f"{keys.PREFIX}{keys.worker_tag(worker)}"
        world.raw.hset(f"{tag}:meta", "places", "g0:GPU")
        world.raw.sadd(f"{tag}:e1:g0:GPU", b"12345678")
        with pytest.raises(StoredValueError, match="places of"):
            await store.load(worker)
        with pytest.raises(StoredValueError, match="places of"):
            await store.commit(Commit(worker, "e1", 0, 0), ME)
        assert await store.open_epoch(worker, "e2", ME) is APPLIED
        assert not any(":e1:" in key for key in world.stored_keys())
        assert held((await store.load(worker)).places) == {}
