# SPDX-License-Identifier: Apache-2.0
"""The newest registration holds, at whichever router it came, and whatever the store lost. Store and routers are real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.fleet import fleet
from kvrouter.router.index.store import keys, registry
from kvrouter.router.model.workers.registration import Registration
from tests.contract.lead_support import FIRST, SECOND, WORKER, router, until
from tests.support.store_server import StoreServer

OLDER = Registration(WORKER, url="http://127.0.0.1:8")
NEWER = Registration(WORKER, url="http://127.0.0.1:9", draining=True)
FIELD = keys.registry_field(WORKER)


def has(core: Core, registration: Registration) -> bool:
    follower = core.registry.followers.get(WORKER)
    return follower is not None and follower.state.registration == registration


def stored(server: StoreServer) -> Registration:
    return registry.decode(WORKER, server.client.hget(keys.registry("m"), FIELD))


@contextlib.contextmanager
def loss(server: StoreServer, *, rise: int) -> Iterator[None]:
    """Lose the registration made meanwhile; the version then differs by `rise` from the one before the loss."""
    former: Any = server.client.hget(keys.registry("m"), FIELD)
    yield
    version = int(server.client.get(keys.REGISTRATIONS))
    with server.client.pipeline() as pipeline:
        pipeline.hset(keys.registry("m"), FIELD, former)
        pipeline.set(keys.REGISTRATIONS, version + rise)
        pipeline.execute()


@pytest.mark.parametrize("rise", [-1, 1], ids=["noticed", "hidden by a router that knew less"])
async def test_a_lost_registration_takes_its_place_again(server: StoreServer, rise: int) -> None:
    async with router(server, FIRST) as first, router(server, SECOND) as second:
        await first.register(OLDER)
        await until(lambda: has(second, OLDER), "it does not arrive")
        with loss(server, rise=rise):
            await first.register(NEWER)
            await until(lambda: has(second, NEWER), "the change does not arrive")
        version = int(server.client.get(keys.REGISTRATIONS))
        await until(lambda: int(server.client.get(keys.REGISTRATIONS)) > version, "the loss stays unnoticed")
        await until(lambda: stored(server) == NEWER and has(first, NEWER) and has(second, NEWER), "it stays lost")


async def test_a_registration_is_changed_as_another_router_left_it(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "REGISTRY_LOOK_S", 3600.0)
    async with router(server, FIRST) as first:
        await first.register(OLDER)
        async with router(server, SECOND) as second:
            await first.register(NEWER)
            assert has(second, OLDER)
            changed = await second.change(
                WORKER, lambda newest: newest and msgspec.structs.replace(newest, lora_name="a")
            )
            assert changed == stored(server) == msgspec.structs.replace(NEWER, lora_name="a")
            await first.unregister(WORKER.worker_id)
            assert await second.change(WORKER, lambda newest: newest) is None


async def test_no_registration_is_acknowledged_that_the_store_may_lack(server: StoreServer) -> None:
    async with router(server, FIRST) as core:
        await core.register(OLDER)
        server.kill()
        with pytest.raises(StoreError):
            await core.register(OLDER)
        server.start()
