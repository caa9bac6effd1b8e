# SPDX-License-Identifier: Apache-2.0
"""A router that follows a worker leads its mirror: exact without the store, and given up with the lease.

Store, sockets and streams are real.
"""

from __future__ import annotations

import asyncio
import functools
import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.follow.fleet.assignment import assign_workers
from kvrouter.router.follow.streams.mirror_lead import MAX_PENDING_BLOCKS
from kvrouter.router.follow.streams.peer_view import META_STATE_LEASE
from kvrouter.router.index.ingest.net_changes import NO_HASHES, ResidencyDelta
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Commit, CommitOutcome, LeaseValue
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from kvrouter.router.model.workers.stream_state import CREDITED, StreamState
from tests.contract.lead_support import (
    CHAIN,
    FIRST,
    SECOND,
    SUSPECT_CREDIT_S,
    TOKENS,
    WORKER,
    following,
    held_in_store,
    is_well,
    registration,
    reused,
    router,
    shows,
    status,
    until,
    until_taken_in,
)
from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import FakeEngine, removed, stored
from tests.support.store_server import StoreServer


async def test_answers_stay_exact_while_the_store_hangs(server: StoreServer, engine: FakeEngine) -> None:
    async with following(server, engine) as first, router(server, SECOND) as second:
        await until(lambda: first.peers.routers == 2 and second.peers.routers == 2, "they do not see each other")
        mine = assign_workers([WORKER], {FIRST, SECOND}, {})[WORKER]
        follower, other = (first, second) if mine == FIRST else (second, first)
        await until(lambda: follower.registry.followers[WORKER].lease.held, "the worker is not handed over")
        await until(lambda: is_well(first, 12) and is_well(second, 12), "not both are well")
        server.stop()
        stopped_s = time.monotonic()
        doubted_s: float | None = None
        uncredited_s: float | None = None
        for gone in range(11, 0, -1):
            seq = engine.publish(*removed(CHAIN[gone : gone + 1]))
            await until(partial(shows, follower, seq), "the follower does not see a removal", 2.0)
            assert reused(follower) == gone
            assert status(follower).state == "live" and status(follower).credited
            pause_s = time.monotonic() + 0.4
            while time.monotonic() < pause_s:
                row, at_s = status(other), time.monotonic() - stopped_s
                if row.state == "suspect":
                    doubted_s = doubted_s or at_s
                if not row.credited:
                    uncredited_s = uncredited_s or at_s
                    assert reused(other) == 0
                await asyncio.sleep(0.01)
        print(f"in doubt after {doubted_s:.2f} s, no credit after {uncredited_s:.2f} s")
        assert doubted_s is not None and doubted_s < 2.0
        assert uncredited_s is not None and doubted_s + 1.5 < uncredited_s < doubted_s + SUSPECT_CREDIT_S + 0.5
        assert any("Redis has not answered" in reason for reason in follower.health())
        assert "Redis" in status(other).reason
        server.resume()
        await until(lambda: is_well(first, 1) and is_well(second, 1), "not both are well again")
        assert held_in_store(server) == set(CHAIN[:1])


@pytest.mark.parametrize("on_its_way", [False, True], ids=["it waits", "a commit is on its way"])
async def test_a_router_that_stops_leaves_nothing_unwritten(
    on_its_way: bool, server: StoreServer, engine: FakeEngine
) -> None:
    async with following(server, engine, flush_interval_s=0.01) as core:
        await until(lambda: held_in_store(server) == set(CHAIN), "the store lacks what was stored")
        if on_its_way:
            server.stop()
            gone = engine.publish(*removed(CHAIN[9:]))
            follower = core.registry.followers[WORKER]
            # The commit waits for the store, and no longer in the backlog.
            await until(
                lambda: (
                    follower.state.shown.seq == gone
                    and follower.commits.unwritten_s
                    and not follower.commits.unwritten_blocks
                ),
                "nothing is sent",
            )
        seq = engine.publish(*removed(CHAIN[6:9]), *([] if on_its_way else removed(CHAIN[9:])))
        while status(core).seq != seq:
            await asyncio.sleep(0)
        stopping = asyncio.ensure_future(core.stop())
        if on_its_way:
            await asyncio.sleep(0.2)
            server.resume()
        await stopping
        assert held_in_store(server) == set(CHAIN[:6])
        assert int(server.client.hget(keys.meta(WORKER), keys.META_SEQ)) == seq


@pytest.mark.parametrize("away", ["killed", "hanging"])
async def test_a_backlog_beyond_its_bound_rewrites_the_epoch(
    away: str, server: StoreServer, engine: FakeEngine
) -> None:
    async with following(server, engine) as core:
        epoch = status(core).epoch
        server.kill() if away == "killed" else server.stop()
        # One commit may be in flight already, and waits for the store beside the backlog.
        others = [value + 1 for value in range(2 * MAX_PENDING_BLOCKS + 15_000)]
        for first in range(0, len(others), 5_000):
            chain = others[first : first + 5_000]
            seq = engine.publish(stored(TOKENS, 0, 1, block_hashes=chain, parent_block_hash=7, token_ids=[]))
        await until_taken_in(core, seq)
        seq = engine.publish(*removed(CHAIN[6:]))
        await until(lambda: status(core).seq == seq, "the removals are not taken in", 5.0)
        assert reused(core) == 6 and status(core).state == "live"
        follower = core.registry.followers[WORKER]
        # The backlog was given up, so not even the removals wait.
        assert follower.commits.unwritten_s and not follower.commits.unwritten_blocks
        mirrored = core.mirror_sync.mirror.worker(WORKER)
        assert mirrored is not None
        slots = list(mirrored.slots)
        server.start() if away == "killed" else server.resume()
        await until(lambda: is_well(core, 6), "not well again")
        await until(lambda: held_in_store(server) == {*CHAIN[:6], *others}, "the store lacks what was rewritten")
        assert status(core).epoch != epoch and not follower.commits.unwritten_blocks
        # The mirror's table is the same, and only the name of the epoch changed.
        mirrored = core.mirror_sync.mirror.worker(WORKER)
        assert mirrored is not None and mirrored.slots == slots
        seq = engine.publish(stored(TOKENS, 6, 12))
        await until(lambda: is_well(core, 12), "it does not go on")
        await until(lambda: held_in_store(server) == {*CHAIN, *others}, "the store does not go on")


async def test_another_key_of_an_engine_keeps_its_stream_and_its_index(server: StoreServer, engine: FakeEngine) -> None:
    async with following(server, engine) as core, router(server, SECOND) as second:
        await until(lambda: is_well(second, 12), "the worker is not live in the second router")
        followers, epoch = [member.registry.followers[WORKER] for member in (core, second)], status(core).epoch
        # The registration has no URL, so no key is sent; a proxied engine has one.
        await core.register(msgspec.structs.replace(followers[0].state.registration, engine_key="team"))

        def named() -> bool:
            return all(
                member.registry.followers[WORKER].state.registration.engine_key == "team" for member in (core, second)
            )

        await until(named, "the key's name does not arrive")
        assert [member.registry.followers[WORKER] for member in (core, second)] == followers
        assert status(core).epoch == epoch and is_well(core, 12) and is_well(second, 12)


async def test_a_lost_lease_ends_the_lead(server: StoreServer, engine: FakeEngine) -> None:
    async with following(server, engine) as core:
        await until(lambda: held_in_store(server) == set(CHAIN), "the store lacks what is known")
        number = int(server.client.hget(keys.meta(WORKER), keys.META_LEASE)) + 1
        # Another router takes the worker, and commits changes that this router does not know.
        server.client.hset(keys.meta(WORKER), keys.META_LEASE, number)
        server.client.set(keys.router_lease(SECOND), 1, px=6_000)
        server.client.set(keys.lease(WORKER), f"{SECOND}:{number}")
        await until(lambda: "follows this worker" in status(core).reason, "the loss is not noticed")
        row = status(core)
        assert row.state == "suspect"
        await until(lambda: not core.mirror_sync._led, "the lead is not given up")
        with pytest.raises(RuntimeError, match="not led here"):
            core.mirror_sync.change(WORKER, [ResidencyDelta(Place(0, "GPU"), NO_HASHES, NO_HASHES)])
        gone = np.array(CHAIN[3:], np.uint64)
        lease = LeaseValue(SECOND, number)
        seq = engine.publish(*removed(CHAIN[3:]))
        change = ResidencyDelta(Place(0, "GPU"), NO_HASHES, gone)
        assert await core._store.commit(Commit(WORKER, row.epoch, seq, seq, [change]), lease) is CommitOutcome.APPLIED
        await until(lambda: reused(core) == 3, "what the other router commits is not shown")
        # The other router has no heartbeat, so its state does not count for long.
        await until(lambda: "no router follows this worker" in status(core).reason, "its silence is not noticed", 2.5)
        assert status(core).state == "suspect"
        # The other router's lease ends, and this router continues from its last commit.
        await until(lambda: is_well(core, 3), "it is not followed again")
        assert core.mirror_sync._led == {WORKER}
        with pytest.raises(RuntimeError, match="led here"):
            core.mirror_sync.take_image(await core._store.load(WORKER))


async def test_the_state_of_an_idle_worker_is_written_under_a_regained_lease(
    server: StoreServer, engine: FakeEngine
) -> None:
    async with following(server, engine) as core:
        await until(lambda: server.client.hget(keys.meta(WORKER), "state") == b"live", "its state is not stored")
        server.client.delete(keys.lease(WORKER))
        await until(lambda: server.client.exists(keys.lease(WORKER)), "the lease is not taken again")
        number = server.client.hget(keys.meta(WORKER), keys.META_LEASE)
        await until(
            lambda: server.client.hget(keys.meta(WORKER), META_STATE_LEASE) == number,
            "no other router would show the worker as it is",
            5.0,
        )
        await until(lambda: is_well(core, 12), "not well again")


async def test_the_problem_of_an_idle_worker_ends_with_that_of_the_store(
    server: StoreServer, engine: FakeEngine
) -> None:
    async with following(server, engine) as core:
        await until(lambda: server.client.hget(keys.meta(WORKER), "state") == b"live", "its state is not stored")
        follower = core.registry.followers[WORKER]
        server.stop()
        try:
            await until(lambda: follower.state.problem is not None, "a store that hangs is not noticed")
        finally:
            server.resume()
        # The engine publishes nothing, so there is nothing new to write.
        await until(lambda: follower.state.problem is None, "a store that answers again is not noticed")
        # The router's own contact with the store is judged by another task.
        await until(lambda: is_well(core, 12), "not well again")


@pytest.mark.parametrize("life", ["same", "another"])
async def test_the_state_of_a_dead_router_is_in_doubt_until_proven(
    life: str, server: StoreServer, engine: FakeEngine
) -> None:
    seen: list[tuple[float, StreamState, bool, int]] = []
    http = EngineHttp()
    async with following(server, engine, url=http.url) as core:
        await until(lambda: server.client.hget(keys.meta(WORKER), "engine_start"), "no start time is stored")
        await until(lambda: server.client.hget(keys.meta(WORKER), "state") == b"live", "its state is not stored")
        # Save the keys as kill -9 leaves them: state, lease and heartbeat as last written.
        saved = {key: server.client.dump(key) for key in server.client.scan_iter("kvr:*")}
    for key, value in saved.items():
        server.client.restore(key, 0, value, replace=True)
    server.client.pexpire(keys.router_lease(FIRST), 1_000)
    assert server.client.hget(keys.meta(WORKER), "state") == b"live"
    if life == "another":
        engine.restart()
        http.start_s = 1_100.5
        proof = engine.publish(stored(TOKENS, 0, 1))

    def watch(core: Core) -> None:
        def look(worker: WorkerKey, view: Any) -> None:
            if view is not None:
                seen.append((time.monotonic(), view.state, view.credited, reused(core)))

        core.registry.subscribe(view=look)

    async with router(server, SECOND, watch) as core:
        if life == "another":
            await until(lambda: is_well(core, 1) and status(core).seq == proof, "the new life is not live")
            # The worker was never live with the blocks of the old life.
            assert not [entry for entry in seen if entry[1] is StreamState.LIVE and entry[3] > 1], seen
        else:
            # The very next batch proves the blocks, and nothing before it.
            await until(lambda: core.registry.followers[WORKER].lease.held, "the worker is not followed")
            while not seen or seen[-1][1] is not StreamState.LIVE:
                assert all(state is not StreamState.LIVE for _, state, _, _ in seen)
                engine.publish(stored(TOKENS, 0, 1))
                await asyncio.sleep(0.05)
            await until(lambda: is_well(core, 12), "it is not well")
        assert any(state is StreamState.SUSPECT for _, state, _, _ in seen)
        assert all(credited is False for _, state, credited, _ in seen if state not in CREDITED)
    http.stop()


async def test_returned_credit_reaches_the_other_routers(server: StoreServer, engine: FakeEngine) -> None:
    async with router(server, FIRST) as first, router(server, SECOND) as second:
        await first.register(registration(engine))
        engine.publish(stored(TOKENS, 0, 12))
        await until(lambda: [*second.statuses()] and is_well(first, 12) and is_well(second, 12), "not both are well")
        # Two workers on one event endpoint contradict each other.
        await first.register(Registration(WorkerKey("m2", "other"), events=engine.endpoint, patch=NO_PATCH))
        follower = first if first.registry.followers[WORKER].lease.held else second
        await until(
            lambda: follower.registry.followers[WORKER].state.view.state is StreamState.MISMATCHED, "no contradiction"
        )
        stored_credit = functools.partial(server.client.hget, keys.meta(WORKER), "credited")
        await until(lambda: stored_credit() == b"0", "the other routers do not learn of it")
        await first.unregister("other")
        await until(lambda: len([*second.statuses()]) == 1, "the other worker stays")
        await until(lambda: is_well(first, 12) and is_well(second, 12), "not both are well again")
