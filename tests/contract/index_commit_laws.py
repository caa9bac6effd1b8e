# SPDX-License-Identifier: Apache-2.0
"""The laws of commits; `test_index_contract.py` runs them on every kind of store."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from kvrouter.router.base.common.checksum import checksum
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Commit, CommitOutcome, LeaseValue
from kvrouter.router.index.store.log_follower import LogFollower
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.index.store.transactions import Transactions
from tests.contract.index_support import (
    APPLIED,
    CPU,
    DISK,
    FENCED,
    GPU,
    ME,
    OTHER,
    PLACES,
    STALE,
    World,
    change,
    checkpoint,
    held,
    next_items,
    supervisor,
    take,
)


class CommitLaws:
    """The laws of commits."""

    async def test_nothing_is_written_in_the_place_of_a_lost_entry(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), ME) is APPLIED
        before = world.snapshot()
        assert await store.note(worker, "e1", ME, {"state": b"live"}, known=3) is STALE
        assert await store.commit(Commit(worker, "e1", 1, 1), ME, known=3) is STALE
        assert world.snapshot() == before
        assert await store.note(worker, "e1", ME, {"state": b"live"}, known=2) is APPLIED
        assert await store.open_epoch(worker, "e2", ME) is APPLIED

    async def test_a_commit_is_stored_as_documented(self, world: World, store: IndexStore) -> None:
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
        tag = f"{keys.PREFIX}{{model/{worker.worker_id}}}"
        own = {f"{tag}:meta", f"{tag}:log", f"{tag}:lease", f"{tag}:e1:copies"}
        assert world.stored_keys() == own
        assert await store.checkpoint(checkpoint(worker, "e1", 7, {GPU: (1, 2**64 - 1), DISK: (3,)}), ME) is APPLIED
        assert world.stored_keys() == own | {f"{tag}:e1:g0:GPU", f"{tag}:e1:g-:STORAGE:fs%3A%7B%7D%0A"}
        assert world.raw.get(f"{tag}:e1:g0:GPU") == bytes(7) + b"\x01" + b"\xff" * 8
        assert world.raw.hget(f"{tag}:meta", "places") == b"g0:GPU=2=%s g-:STORAGE:fs%%3A%%7B%%7D%%0A=1=%s" % (
            checksum(bytes(7) + b"\x01" + b"\xff" * 8),
            checksum(bytes(7) + b"\x03"),
        )
        assert world.raw.hget(f"{tag}:meta", "checkpoint") == world.raw.hget(f"{tag}:meta", "commits") == b"2"
        field = b"g0:GPU" + bytes(7) + b"\x01"
        mark = b"g-:mark" + bytes(8)
        assert world.raw.hgetall(f"{tag}:e1:copies") == {name: b"2 " + checksum(name, b"2") for name in (field, mark)}
        assert world.raw.hget(f"{tag}:meta", "seq") == b"7"
        image = await store.load(worker)
        assert (image.epoch, image.seq, image.commits, image.meta) == ("e1", 7, 2, {"state": b"live"})
        assert held(image.places) == {GPU: {1, 2**64 - 1}, DISK: {3}}
        assert await store.committed(worker) == ("e1", 7)

    async def test_a_replayed_commit_changes_nothing(self, world: World, store: IndexStore) -> None:
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

    async def test_a_hole_in_the_seqs_is_refused(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        assert await store.commit(Commit(worker, "e1", 4, 4, [change(GPU, (1,))]), ME) is APPLIED
        before = world.snapshot()
        assert await store.commit(Commit(worker, "e1", 6, 6, [change(GPU, (2,))]), ME) is STALE
        assert world.snapshot() == before
        assert await store.commit(Commit(worker, "e1", 5, 6, [change(GPU, (2,))]), ME) is APPLIED
        assert held((await store.load(worker)).places) == {GPU: {1, 2}}

    async def test_a_fenced_commit_changes_nothing(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), ME) is APPLIED
        before = world.snapshot()
        assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), OTHER) is FENCED
        assert await store.open_epoch(worker, "e2", OTHER) is FENCED
        assert world.snapshot() == before
        assert await store.leases.release(worker, ME)
        assert await store.commit(Commit(worker, "e1", 1, 1, [change(GPU, (2,))]), ME) is FENCED

    async def test_a_lease_that_changes_hands_between_check_and_exec_fences(
        self, world: World, store: IndexStore
    ) -> None:
        worker = await world.owned(store)
        seen: list[bytes | None] = []

        def write(holder: bytes | None, head: Any) -> list[bytes] | CommitOutcome:
            seen.append(holder)
            if holder != ME.value:
                return FENCED
            world.raw.set(keys.lease(worker), "thief")
            return [
                b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$1\r\nx\r\n" % (len(keys.lease(worker)), keys.lease(worker).encode())
            ]

        assert await Transactions(store.servers).run(worker, write) is FENCED
        assert seen == [ME.value, b"thief"]
        assert world.raw.get(keys.lease(worker)) == b"thief"

    async def test_another_epochs_commit_is_stale(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        assert await store.open_epoch(worker, "e2", ME, {"state": b"live"}) is APPLIED
        before = world.snapshot()
        assert await store.commit(Commit(worker, "e1", 0, 0, [change(GPU, (1,))]), ME) is STALE
        assert await store.open_epoch(worker, "e2", ME) is STALE
        assert world.snapshot() == before

    async def test_voiding_an_epoch_leaves_no_keys(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        full = [change(place, (1, 2, 3)) for place in PLACES]
        assert await store.commit(Commit(worker, "e1", 0, 0, full, [(CPU, 1, 2)]), ME) is APPLIED
        held = dict.fromkeys(PLACES, (1, 2, 3))
        assert await store.checkpoint(checkpoint(worker, "e1", 0, held), ME) is APPLIED
        assert sum(":e1:" in key for key in world.stored_keys()) == 4
        assert await store.open_epoch(worker, "e2", ME) is APPLIED
        assert not any(":e1:" in key for key in world.stored_keys())
        assert await store.commit(Commit(worker, "e2", 0, 0, full, [(CPU, 1, 2)]), ME) is APPLIED
        assert await store.checkpoint(checkpoint(worker, "e2", 0, held), ME) is APPLIED
        emptied = [change(place, (), (1, 2, 3)) for place in PLACES]
        assert await store.commit(Commit(worker, "e2", 1, 1, emptied, [(CPU, 1, 0)]), ME) is APPLIED
        nothing = dict.fromkeys(PLACES, ())
        assert await store.checkpoint(checkpoint(worker, "e2", 1, nothing), ME) is APPLIED
        assert [key for key in world.stored_keys() if ":e2:" in key] == [keys.copies(worker, "e2")]
        assert (await store.load(worker)).seq == 1

    async def test_copies_are_persisted_only_from_two_on(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        counts = [(GPU, 1, 1), (GPU, 2, 2), (CPU, 2, 7), (DISK, 3, 0)]
        assert await store.commit(Commit(worker, "e1", 0, 0, copies=counts), ME) is APPLIED
        assert await store.load_copies(worker) == {(GPU, 2): 2, (CPU, 2): 7}
        assert world.raw.hlen(keys.copies(worker, "e1")) == 2 + 1
        assert await store.commit(Commit(worker, "e1", 1, 1, copies=[(CPU, 2, 1), (GPU, 2, 0)]), ME) is APPLIED
        assert await store.load_copies(worker) == {}
        assert world.raw.hlen(keys.copies(worker, "e1")) == 1

    @pytest.mark.parametrize("goes_on", [False, True])
    async def test_a_key_that_was_evicted_is_never_read_as_an_empty_one(
        self, world: World, store: IndexStore, goes_on: bool
    ) -> None:
        """Each key is evicted alone, also while its owner goes on and writes it again."""
        found: dict[str, str] = {}
        for number in itertools.count():
            worker = await world.owned(store)
            first = Commit(worker, "e1", 0, 0, [change(GPU, (1, 2))], [(GPU, 1, 2)])
            assert await store.commit(first, ME) is APPLIED
            assert await store.checkpoint(checkpoint(worker, "e1", 0, {GPU: (1, 2)}), ME) is APPLIED
            assert await store.commit(Commit(worker, "e1", 1, 1, [change(CPU, (3,))], [(CPU, 3, 2)]), ME) is APPLIED
            assert (await store.load(worker)).seq == 1 and len(await store.load_copies(worker)) == 2
            tag = keys.worker_tag(worker)
            own = sorted(key for key in world.stored_keys() if tag in key and key != keys.lease(worker))
            if number == len(own):
                break
            world.raw.delete(own[number])
            last = Commit(worker, "e1", 2, 2, [change(GPU, (4,))], [(GPU, 2, 2)])
            outcome = await store.commit(last, ME, known=3) if goes_on else None
            try:
                image, _ = await store.load(worker), await store.load_copies(worker)
                found[own[number].rpartition(tag)[2]] = "nothing is there" if image.epoch is None else "unchanged"
            except StoredValueError as error:
                assert error.key == own[number]
                found[own[number].rpartition(tag)[2]] = "refused"
            assert outcome is (None if not goes_on else STALE if own[number] == keys.meta(worker) else APPLIED)
        assert found == {":meta": "nothing is there"} | dict.fromkeys((":log", ":e1:copies", ":e1:g0:GPU"), "refused")

    async def test_copies_of_an_older_router_are_read_without_a_mark(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        world.raw.hdel(keys.meta(worker), keys.META_MARK)
        world.raw.delete(keys.copies(worker, "e1"))
        assert await store.load_copies(worker) == {}
        assert await store.commit(Commit(worker, "e1", 0, 0, copies=[(GPU, 2, 2)]), ME) is APPLIED
        assert await store.load_copies(worker) == {(GPU, 2): 2}

    async def test_an_epoch_that_begins_while_copies_are_read_is_no_loss(
        self, world: World, store: IndexStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker, epochs, run = await world.owned(store), ["e3", "e2"], Connection.run

        async def run_late(connection: Connection, data: bytes, *arguments: Any) -> list[Any]:
            if b"HGETALL" in data and epochs:
                assert await other.open_epoch(worker, epochs.pop(), ME) is APPLIED
            return await run(connection, data, *arguments)

        async with world.store() as other:
            monkeypatch.setattr(Connection, "run", run_late)
            assert await store.load_copies(worker) == {}
        assert not epochs and await store.committed(worker) == ("e3", None)

    async def test_the_stores_own_meta_fields_cannot_be_overwritten(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        for field in keys.META_FIELDS:
            with pytest.raises(ValueError, match=field):
                await store.commit(Commit(worker, "e1", 0, 0, meta={field: b"9"}), ME)
            with pytest.raises(ValueError, match=field):
                await store.open_epoch(worker, "e2", ME, {field: b"9"})

    async def test_a_note_changes_meta_and_the_log_only(self, world: World, store: IndexStore) -> None:
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

    async def test_only_commits_of_the_lease_holder_land(self, world: World, store: IndexStore) -> None:
        worker = await world.owned(store)
        assert await store.leases.release(worker, ME)
        for token in ("a", "b"):
            await store.leases.renew(token, 1, 60)
        leases: set[LeaseValue] = set()
        landed: dict[int, str] = {}
        refused = 0

        async def owner(token: str) -> None:
            nonlocal refused
            while len(landed) < 200:
                lease = await take(store, worker, token)
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
                # A router that lost the lease waits until the other router has committed once.
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
