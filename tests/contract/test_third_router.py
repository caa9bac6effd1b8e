# SPDX-License-Identifier: Apache-2.0
"""The state that a router shows of a worker it does not follow: only a state that the current follower vouches for.

Store, sockets and streams are real.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvrouter.router.app.core.router_core import Core
from kvrouter.router.follow.fleet.assignment import assign_workers
from kvrouter.router.follow.streams import event_source
from kvrouter.router.follow.streams.peer_view import META_STATE_LEASE, state_fields
from kvrouter.router.index.ingest.worker_profile import META_REPORT_EPOCH
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Commit
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.contract.lead_support import (
    FIRST,
    SECOND,
    TOKENS,
    WORKER,
    is_well,
    registration,
    reused,
    router,
    shows,
    status,
    until,
)
from tests.support.fake_engine import FakeEngine, stored
from tests.support.ingest_steps import batch, live
from tests.support.ports import free_port
from tests.support.store_server import StoreServer

# How often the follower gives the worker up and takes it again.
GIVE_UPS = 3


def apart(first: Core, second: Core) -> tuple[Core, Core]:
    """Return the router that should follow the worker, and the other one."""
    is_first = assign_workers([WORKER], {FIRST, SECOND}, {})[WORKER] == FIRST
    return (first, second) if is_first else (second, first)


async def leave_dead(server: StoreServer) -> None:
    """Write the state that a dead router left: twelve blocks, live and credited, under a lease that nobody renews."""
    ingest = live()
    ingest.apply(batch(0, stored(TOKENS, 0, 12)), 1.0)
    flush = ingest.held.take()
    assert flush is not None and flush.seqs is not None
    store = await IndexStore.open(server.url)
    taken = await store.leases.take(WORKER, "dead-router")
    assert taken is not None
    lease, _ = taken
    # The dead router followed reports of a patch, so the next one waits for the patch.
    state = {META_REPORT_EPOCH: b"a" * 16}
    state |= state_fields(StreamState.LIVE, "", True, None) | {META_STATE_LEASE: b"%d" % lease.number}
    await store.open_epoch(WORKER, flush.epoch, lease, flush.meta | state)
    await store.commit(Commit(WORKER, flush.epoch, *flush.seqs, flush.changes, flush.copies, {}), lease)
    await store.close()


async def test_a_follower_that_finds_no_engine_does_not_keep_the_dead_routers_word_alive(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a router and its patched engine die together.

    The next router takes the lease, greets the engine, gives up, and begins again.
    """
    # In this time, four heartbeats report that the router follows the worker.
    monkeypatch.setattr(event_source, "GREET_KNOWN_S", 1.0)
    seen: list[tuple[StreamState, bool]] = []

    def watch(core: Core) -> None:
        def look(_: Any, view: Any) -> None:
            if view is not None:
                seen.append((view.state, view.credited))

        core.registry.subscribe(view=look)

    def lease() -> int:
        return int(server.client.hget(keys.meta(WORKER), keys.META_LEASE))

    await leave_dead(server)
    async with AsyncExitStack() as stack:
        follows_first = assign_workers([WORKER], {FIRST, SECOND}, {})[WORKER] == FIRST
        follower, third = (FIRST, SECOND) if follows_first else (SECOND, FIRST)
        first = await stack.enter_async_context(router(server, follower))
        await first.register(Registration(WORKER, patch=f"tcp://127.0.0.1:{free_port()}"))
        second = await stack.enter_async_context(router(server, third, watch))
        await until(lambda: WORKER in second.registry.followers, "the registration is not known at the other")
        await until(lambda: first.peers.routers == 2 and second.peers.routers == 2, "they do not see each other")
        await until(lambda: any(credited for _, credited in seen), "what is stored is not shown")
        await until(lambda: reused(second) == 0, "doubt is credited for ever")
        assert not second.registry.followers[WORKER].lease.held
        withdrawn, before = len(seen), lease()
        await until(lambda: lease() >= before + GIVE_UPS, "the follower does not try again")
        assert not [state for state, _ in seen if state is StreamState.LIVE], "the dead router's word"
        assert not [credited for _, credited in seen[withdrawn:] if credited], "doubt has begun again"
        row = status(second)
        assert row.state == "suspect" and row.reason


async def test_a_router_that_hears_the_follower_and_not_its_log_is_in_doubt_until_it_has_read_it(
    server: StoreServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router(server, FIRST) as first, router(server, SECOND) as second:
        await until(lambda: first.peers.routers == 2 and second.peers.routers == 2, "they do not see each other")
        await first.register(registration(engine))
        await until(lambda: WORKER in second.registry.followers, "the registration is not known at the other")
        engine.publish(stored(TOKENS, 0, 12))
        await until(lambda: is_well(first, 12) and is_well(second, 12), "not both are well")
        follower, third = apart(first, second)
        assert follower.registry.followers[WORKER].lease.held and not third.registry.followers[WORKER].lease.held
        # Hold the log back as a slow connection to the store would; heartbeats come over another one.
        gate, sync = asyncio.Event(), third.mirror_sync

        async def wait_and_read() -> Any:
            await gate.wait()
            return await read()

        read = sync._follower.next
        monkeypatch.setattr(sync._follower, "next", wait_and_read)
        # One read was in flight already.
        seq = engine.publish(stored(TOKENS, 0, 1))
        await until(lambda: shows(third, seq), "the read under way is not applied")
        seq = engine.publish(stored(TOKENS, 0, 2))
        await until(lambda: shows(follower, seq), "the follower is behind")
        await until(lambda: status(third).state == "suspect", "old content is shown as live for ever")
        assert "has written more than was read here" in status(third).reason
        assert reused(third) == 12, "doubt is credited for a while"
        await until(lambda: reused(third) == 0, "doubt is credited for ever")
        assert follower.health() == [] and status(follower).state == "live"
        gate.set()
        await until(lambda: is_well(third, 12) and shows(third, seq), "it is not live again")
