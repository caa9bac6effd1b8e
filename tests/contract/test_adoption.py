# SPDX-License-Identifier: Apache-2.0
"""Registrations of the former schema are taken over once, although the store may lose the record of that."""

from __future__ import annotations

import msgspec
import pytest

from kvrouter.router.follow.fleet import adoption
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.registry import encode
from kvrouter.router.model.workers.registration import Registration
from tests.contract.lead_support import FIRST, SECOND, WORKER, router, until
from tests.support.store_server import StoreServer

OTHER = WORKER._replace(worker_id="other")
FORMER = {worker: Registration(worker, url="http://127.0.0.1:8") for worker in (WORKER, OTHER)}
MOVED = Registration(WORKER, url="http://127.0.0.1:9")


def register_before(server: StoreServer, *registrations: Registration) -> None:
    """Register workers as a router of the former schema does."""
    for registration in registrations:
        worker = registration.worker
        server.client.hset(
            keys.registry(worker.model, keys.FORMER_PREFIX), keys.registry_field(worker), encode(registration)
        )
        server.client.sadd(keys.models(keys.FORMER_PREFIX), keys.model_member(worker.model))
        server.client.incr(keys.FORMER_REGISTRATIONS)


async def test_a_lost_record_of_the_takeover_brings_nothing_back(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "LOOK_S", 0.05)
    monkeypatch.setattr(adoption, "RETRY_S", 0.1)
    register_before(server, *FORMER.values())
    async with router(server, FIRST) as core:
        assert core.registry.followers.keys() == FORMER.keys()
        await until(lambda: server.client.hexists(keys.SCHEMAS, keys.SCHEMAS_ADOPTED), "the takeover is not noted")
        await core.register(MOVED)
        await core.unregister(OTHER.worker_id)
    server.client.delete(keys.ADOPTED)
    async with router(server, SECOND) as core:
        # It is not known whether the worker was unregistered here, or registered there since.
        (problem,) = core.adoption.problems
        assert "worker other" in problem
        assert core.registry.followers.keys() == {WORKER}
        assert core.registry.followers[WORKER].state.registration == MOVED
        # Both ways out of the doubt.
        await core.register(FORMER[OTHER])
        await until(lambda: not core.adoption.problems, "it is still said")
        await core.unregister(OTHER.worker_id)
        server.client.delete(keys.ADOPTED)
        server.client.hdel(keys.registry(OTHER.model, keys.FORMER_PREFIX), keys.registry_field(OTHER))
        server.client.incr(keys.FORMER_REGISTRATIONS)
        later = msgspec.structs.replace(FORMER[OTHER], worker=WORKER._replace(worker_id="later"))
        register_before(server, later)
        await until(lambda: "worker later" in str(core.adoption.problems), "a change there is taken for an earlier one")
        await core.register(later)
        await until(lambda: not core.adoption.problems, "it is still said")
        # From then on changes there count again.
        register_before(server, FORMER[OTHER])
        await until(lambda: OTHER in core.registry.followers, "it is not taken over")


async def test_a_lost_note_of_schemas_is_written_again(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "LOOK_S", 0.05)
    register_before(server, FORMER[OTHER])
    async with router(server, FIRST) as core:
        await core.unregister(OTHER.worker_id)
        server.client.delete(keys.SCHEMAS)
        await until(lambda: server.client.hexists(keys.SCHEMAS, keys.SCHEMAS_ADOPTED), "it is not written again")
    server.client.delete(keys.ADOPTED)
    async with router(server, SECOND) as core:
        assert OTHER not in core.registry.followers
