# SPDX-License-Identifier: Apache-2.0
"""The reactions of a lease holder when Redis lost or changed its data.

The store is real; a direct client plays the losses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import redis

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.follow.streams.lease import HandedOver, Lease, LeaseLost
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.follow.streams.stream_metrics import StreamMetrics
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import head_fields
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config

WORKER = WorkerKey("m", "held")
WAIT_S = 15.0
TTL_S = 0.4

Held = tuple[Lease, Lease, Any, asyncio.Task[None]]


def flush(epoch: str, seq: int, *, opens: bool = False) -> PendingCommit:
    added = np.array([seq + 1], np.uint64)
    changes = [ResidencyDelta(Place(0, "GPU"), added, added[:0])]
    return PendingCommit(epoch=epoch, opens_epoch=opens, seqs=(seq, seq), changes=changes, copies=[], meta={})


@pytest.fixture
@asynccontextmanager
async def held(embedded_url: str) -> AsyncIterator[Held]:
    """Provide the holders of two processes on one worker.

    The first holder has the lease and wrote batch 0. A direct client, and the task that renews the lease of the first
    process, come with them.
    """
    raw = redis.Redis.from_url(embedded_url)
    raw.flushall()
    store = await IndexStore.open(embedded_url, wall_clock=lambda: 0.0)
    renewing: list[asyncio.Task[None]] = []

    def hold(token: str) -> Lease:
        rounds = LeaseRounds(store.leases, token, TTL_S, lambda: 0)
        renewing.append(asyncio.ensure_future(rounds.run()))
        services = SimpleNamespace(
            store=store,
            leases=rounds,
            held=HeldWorkers(),
            token=token,
            config=Config(lease_ttl_s=TTL_S),
            metrics=StreamMetrics(MetricRegistry()),
            clock=time.monotonic,
            mine=lambda worker: True,
            disowns=lambda token, worker, since_s: False,
        )
        return Lease(WORKER, cast(StreamServices, services), lambda problem: None)

    try:
        async with asyncio.timeout(WAIT_S):
            holder, rival = hold("one"), hold("two")
            assert not await holder.take()
            await holder.write(flush("e", 0, opens=True))
            yield holder, rival, raw, renewing[0]
    finally:
        for task in renewing:
            task.cancel()
        await store.close()
        raw.close()


async def test_writes_that_the_store_lost_are_noticed_while_nothing_is_written(held: Held) -> None:
    holder, _, raw, *_ = held
    saved = raw.dump(keys.meta(WORKER))
    await holder.write(flush("e", 1))
    # A promoted replica may have the lease, but lack the last commit.
    raw.restore(keys.meta(WORKER), 0, saved, replace=True)
    with pytest.raises(LeaseLost, match="lost commits"):
        await holder.keep(lambda: True)


@pytest.mark.parametrize("next_", ["nothing", "a commit", "a note"])
async def test_a_note_that_the_store_lost_is_noticed(next_: str, held: Held) -> None:
    holder, _, raw, *_ = held
    saved = raw.dump(keys.meta(WORKER))
    await holder.note("e", {"state": b"live"})
    # Play a promoted replica: epoch and seq are current, but the state that other routers show is not.
    raw.restore(keys.meta(WORKER), 0, saved, replace=True)
    raw.xdel(keys.log(WORKER), raw.xrevrange(keys.log(WORKER), count=1)[0][0])
    with pytest.raises(LeaseLost, match="lost commits"):
        if next_ == "a commit":
            await holder.write(flush("e", 1))
        elif next_ == "a note":
            await holder.note("e", {"state": b"live"})
        else:
            await holder.keep(lambda: True)
    await holder.release()
    assert await holder.take()
    assert holder.written == ("e", 0), "nothing goes in the place of the lost note"


async def test_no_commit_goes_into_an_epoch_that_lost_all_of_its_own(held: Held) -> None:
    holder, _, raw, *_ = held
    # A crash may lose the commits of an epoch, and leave what opened it.
    head = {name: value for name, value in raw.hgetall(keys.meta(WORKER)).items() if name != b"seq"}
    # With as many entries as before, as notes may have come since.
    commits = int(head[b"commits"])
    head[b"sum"] = head_fields("e", None, commits, 1, b"")["sum"]
    head[b"checkpoint"] = b"1"
    raw.delete(keys.meta(WORKER))
    raw.hset(keys.meta(WORKER), mapping=head)
    with pytest.raises(LeaseLost, match="another state"):
        await holder.write(flush("e", 1))
    await holder.release()
    assert await holder.take()
    # The memory does not continue what the store has, so all of it is written again.
    assert holder.written == ("e", None)


@pytest.mark.parametrize("is_taken_again", [False, True])
async def test_a_loss_that_two_requests_notice_counts_once(is_taken_again: bool, held: Held) -> None:
    holder, _, raw, *_ = held
    await holder.note("e", {"state": b"live"})
    raw.delete(keys.meta(WORKER))
    with pytest.raises(LeaseLost):
        await holder.write(flush("e", 1))
    if is_taken_again:
        # `keep` takes the lease again before it compares the data.
        raw.delete(keys.lease(WORKER))
    with pytest.raises(LeaseLost):
        await holder.keep(lambda: True)
    assert sum(counter.value for counter in holder._metrics.leases_lost.values()) == 1


async def test_writes_that_the_store_lost_are_noticed_though_its_last_reply_comes_again(held: Held) -> None:
    holder, _, raw, *_ = held
    kept = asyncio.ensure_future(holder.keep(lambda: True))
    renewals = int(raw.get(keys.router_lease("one")))
    while int(raw.get(keys.router_lease("one"))) < renewals + 3:
        await asyncio.sleep(0.005)
    saved = raw.dump(keys.meta(WORKER))
    await holder.write(flush("e", 1))
    raw.restore(keys.meta(WORKER), 0, saved, replace=True)
    with pytest.raises(LeaseLost, match="lost commits"):
        await kept


async def test_a_worker_is_taken_when_its_router_renews_no_more_and_lost_once_it_continues(held: Held) -> None:
    holder, rival, raw, renewing = held
    taking = asyncio.ensure_future(rival.take())
    await asyncio.sleep(3 * TTL_S)
    assert not taking.done()
    renewing.cancel()
    assert not await taking
    stored = raw.hgetall(keys.meta(WORKER))
    with pytest.raises(LeaseLost, match="another router"):
        await holder.write(flush("e", 1))
    assert raw.hgetall(keys.meta(WORKER)) == stored
    again = asyncio.ensure_future(holder._rounds.run())
    with pytest.raises(LeaseLost, match="another router"):
        await holder.keep(lambda: True)
    again.cancel()


async def test_nothing_is_taken_before_the_router_has_a_lease(held: Held) -> None:
    holder, rival, raw, renewing = held
    await holder.release()
    rival._rounds = LeaseRounds(holder._store.leases, "two", TTL_S, lambda: 0)
    taking = asyncio.ensure_future(rival.take())
    await asyncio.sleep(TTL_S)
    assert not taking.done() and raw.get(keys.lease(WORKER)) is None
    renewing = asyncio.ensure_future(rival._rounds.run())
    await taking
    assert raw.get(keys.lease(WORKER)) == b"two:2" and raw.exists(keys.router_lease("two"))
    renewing.cancel()


async def test_a_lease_that_the_store_lost_is_taken_again_in_place(held: Held) -> None:
    holder, _, raw, *_ = held
    raw.delete(keys.lease(WORKER))
    await holder.write(flush("e", 1))
    assert raw.hget(keys.meta(WORKER), "seq") == b"1"
    assert raw.get(keys.lease(WORKER)) == b"one:2"


async def test_a_router_that_waits_for_a_lease_shows_none(held: Held) -> None:
    holder, _, raw, *_ = held
    # It had one, and failed to load what it needs. Another router took the worker meanwhile.
    raw.set(keys.lease(WORKER), "two:2")
    raw.set(keys.router_lease("two"), 1, px=60_000)
    assert holder.held and holder._held.holdings
    taking = asyncio.ensure_future(holder.take())
    await asyncio.sleep(TTL_S)
    assert not taking.done() and not holder.held and not holder._held.holdings
    taking.cancel()


async def test_a_lease_stays_while_its_router_renews(held: Held) -> None:
    holder, _, raw, *_ = held
    kept = asyncio.ensure_future(holder.keep(lambda: True))
    ended = asyncio.get_running_loop().time() + 3 * TTL_S
    seq = 0
    # The lease must stay under constant writes, and without any.
    while asyncio.get_running_loop().time() < ended - TTL_S:
        seq += 1
        await holder.write(flush("e", seq))
    await asyncio.sleep(2 * TTL_S)
    assert raw.get(keys.lease(WORKER)) == b"one:1" and not kept.done()
    kept.cancel()


async def test_a_lease_that_was_lost_while_nothing_was_written_is_taken_again_in_place(held: Held) -> None:
    holder, _, raw, *_ = held
    kept = asyncio.ensure_future(holder.keep(lambda: True))
    raw.delete(keys.lease(WORKER))
    while raw.get(keys.lease(WORKER)) != b"one:2":
        await asyncio.sleep(0.01)
    assert not kept.done()
    kept.cancel()


async def test_a_lease_that_another_has_is_given_up_while_nothing_is_written(held: Held) -> None:
    holder, rival, raw, *_ = held
    raw.delete(keys.lease(WORKER))
    assert not await rival.take()
    with pytest.raises(LeaseLost, match="another router"):
        await holder.keep(lambda: True)


async def test_a_lease_that_is_no_lease_is_taken_again(held: Held) -> None:
    holder, _, raw, *_ = held
    kept = asyncio.ensure_future(holder.keep(lambda: True))
    raw.delete(keys.lease(WORKER))
    raw.rpush(keys.lease(WORKER), "not ours")
    while raw.type(keys.lease(WORKER)) != b"string":
        await asyncio.sleep(0.01)
    assert raw.get(keys.lease(WORKER)) == b"one:2" and not kept.done()
    kept.cancel()


async def test_a_lease_that_another_router_held_meanwhile_is_not_taken_in_place(held: Held) -> None:
    holder, rival, raw, *_ = held
    raw.delete(keys.lease(WORKER))
    assert not await rival.take()
    await rival.release()
    with pytest.raises(LeaseLost, match="meanwhile"):
        await holder.write(flush("e", 1))
    assert raw.hget(keys.meta(WORKER), "seq") == b"0"
    await holder.release()
    # The take reports that another process had the lease meanwhile, so this process must not continue from its
    # memory.
    assert not await holder.take()
    await holder.release()
    assert await holder.take()


async def test_a_share_of_another_is_handed_over_where_that_loses_nothing(held: Held) -> None:
    holder, *_ = held
    cast(Any, holder)._services.mine = lambda worker: False
    kept = asyncio.ensure_future(holder.keep(lambda: False))
    await asyncio.sleep(TTL_S)
    assert not kept.done()
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
    with pytest.raises(HandedOver):
        await holder.keep(lambda: True)
