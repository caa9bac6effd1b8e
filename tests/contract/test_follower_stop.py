# SPDX-License-Identifier: Apache-2.0
"""A worker's stream ends when it is stopped, even if its lease is lost at that very moment."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
import zmq

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.lease import LeaseLost
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.workers.registration import Registration
from tests.support.bare_services import bare_services

WORKER = WorkerKey("m", "stopping")


@pytest.mark.parametrize("stops", [True, False], ids=["stopping", "going on"])
async def test_a_lease_lost_while_stopping_does_not_keep_the_stream_running(stops: bool, embedded_url: str) -> None:
    store = await IndexStore.open(embedded_url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    services = dataclasses.replace(
        bare_services(time.monotonic),
        store=store,
        leases=LeaseRounds(store.leases, "t", 1.0, lambda: 0),
        context=context,
    )
    follower = Follower(Registration(WORKER), services)
    lost = asyncio.Event()

    async def loses() -> None:
        await lost.wait()
        raise LeaseLost("at the same moment")

    following = asyncio.ensure_future(follower.hold(loses()))
    await asyncio.sleep(0)
    lost.set()
    if stops:
        await follower.stop()
        following.cancel()
    (ended,) = await asyncio.gather(following, return_exceptions=True)
    await store.close()
    context.destroy(linger=0)
    assert isinstance(ended, asyncio.CancelledError if stops else LeaseLost)
