# SPDX-License-Identifier: Apache-2.0
"""The law of checkpoints among several writers; `test_index_contract.py` runs it on every kind of store."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Commit, LeaseValue
from kvrouter.router.index.store.store import IndexStore
from tests.contract.index_support import (
    APPLIED,
    FENCED,
    GPU,
    PLACES,
    STALE,
    Residency,
    World,
    change,
    checkpoint,
    held,
    take,
)
from tests.support.examples import examples

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit"] * 5 + ["checkpoint"] * 3 + ["take over", "late commit", "late checkpoint", "epoch"]),
        st.sampled_from(PLACES),
        st.sets(st.integers(0, 20)),
        st.sets(st.integers(0, 20)),
    ),
    max_size=25,
)


class Router:
    """A process that follows the worker: its lease, and the residency in its memory."""

    def __init__(self, store: IndexStore, worker: WorkerKey, name: str) -> None:
        self.store = store
        self.worker = worker
        self.name = name
        self.lease = LeaseValue(name, 0)
        self.epoch = ""
        self.seq = -1
        self.residency: Residency = {}

    async def take_over(self, world: World) -> None:
        """Take the lease after another router's lease ended, whatever that router was about to write."""
        world.raw.delete(keys.lease(self.worker))
        lease = await take(self.store, self.worker, self.name, above=self.lease.number)
        assert lease is not None
        image = await self.store.load(self.worker)
        self.lease, self.epoch, self.seq = lease, image.epoch or "", -1 if image.seq is None else image.seq
        self.residency = held(image.places)

    async def commit(self, place: Any, added: set[int], removed: set[int]) -> Any:
        commit = Commit(self.worker, self.epoch, self.seq + 1, self.seq + 1, [change(place, (*added,), (*removed,))])
        outcome = await self.store.commit(commit, self.lease)
        if outcome is APPLIED:
            self.seq += 1
            self.residency[place] = (self.residency.get(place, set()) - removed) | added
        return outcome

    async def write_checkpoint(self) -> Any:
        return await self.store.checkpoint(checkpoint(self.worker, self.epoch, self.seq, self.residency), self.lease)


class CheckpointLaws:
    @given(steps=STEPS)
    @settings(
        max_examples=examples(40),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    def test_a_loaded_image_equals_the_committed_one(self, world: World, steps: list[Any]) -> None:
        async def body(store: IndexStore) -> None:
            worker = await world.owned(store)
            now, before = Router(store, worker, "a"), Router(store, worker, "b")
            await before.take_over(world)
            await now.take_over(world)
            expected: Residency = {}
            for number, (kind, place, added, removed) in enumerate(steps):
                stored = world.snapshot() if kind.startswith("late") else None
                if kind == "commit":
                    assert await now.commit(place, added, removed - added) is APPLIED
                    expected[place] = (expected.get(place, set()) - removed) | added
                elif kind == "checkpoint":
                    assert await now.write_checkpoint() is (STALE if now.seq < 0 else APPLIED)
                elif kind == "take over":
                    now, before = before, now
                    await now.take_over(world)
                elif kind == "epoch":
                    now.epoch, now.seq, now.residency, expected = f"n{number}", -1, {}, {}
                    assert await store.open_epoch(worker, now.epoch, now.lease) is APPLIED
                elif kind == "late commit":
                    assert await before.commit(GPU, {99}, set()) is FENCED
                else:
                    assert await before.write_checkpoint() is FENCED
                if stored is not None:
                    assert world.snapshot() == stored
                assert held((await store.load(worker)).places) == {
                    p: blocks for p, blocks in expected.items() if blocks
                }

        world.run(body)
