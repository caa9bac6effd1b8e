# SPDX-License-Identifier: Apache-2.0
"""The kind of an engine that no registration states.

It is queried over HTTP, kept by all routers, and not undone by an engine that registers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import FILE
from tests.support.engine_http import EngineHttp
from tests.support.listed_routers import STILL_S, TIMEOUT_S, Listed, Router, routing

SERVER_INFO = {"disable_radix_cache": False, "kv_events": {"publisher": "zmq", "endpoint_port_base": 5557}}
WORKER = WorkerKey("m", "w")


@pytest.fixture
def sglang() -> Iterator[EngineHttp]:
    engine = EngineHttp()
    engine.missing = {"/kv_event_sources"}
    engine.pages["/server_info"] = msgspec.json.encode(SERVER_INFO)
    yield engine
    engine.stop()


def written_by_hand(engine: EngineHttp) -> Registration:
    return Registration(WORKER, url=engine.url, events="tcp://127.0.0.1:1")


async def kind_is(router: Router, expected: str | None) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while [registration.engine for registration in router.core.registrations()] != [expected]:
            await asyncio.sleep(0.01)


async def test_an_engine_is_recognised_and_stays_so(url: str, sglang: EngineHttp) -> None:
    async with routing(url, asks_engines=True) as router, routing(url, asks_engines=True) as other:
        await router.core.register(written_by_hand(sglang))
        await kind_is(router, "sglang")
        await kind_is(other, "sglang")
        assert router.core.registry.followers[WORKER].state.profile.engine.name == "sglang"
        # An engine that registers itself does so periodically.
        await router.core.register(written_by_hand(sglang))
        assert [registration.engine for registration in router.core.registrations()] == ["sglang"]


async def test_a_source_does_not_undo_what_was_found(url: str, sglang: EngineHttp) -> None:
    source = Listed(FILE, f"w={sglang.url}")
    async with routing(url, source, asks_engines=True) as router:
        await kind_is(router, "sglang")
        epoch = router.core.registry.followers[WORKER]
        await asyncio.sleep(STILL_S)
        # The stream is the same, so nothing was registered again.
        assert router.core.registry.followers[WORKER] is epoch
        assert [registration.engine for registration in router.core.registrations()] == ["sglang"]


async def test_another_engine_at_the_same_place_is_named(url: str, sglang: EngineHttp) -> None:
    async with routing(url, asks_engines=True) as router:
        stated = msgspec.structs.replace(written_by_hand(sglang), engine="vllm")
        await router.core.register(stated)
        async with asyncio.timeout(TIMEOUT_S):
            while "its HTTP is SGLang's" not in router.core.registry.followers[WORKER].state.note:
                await asyncio.sleep(0.01)
        # The stated kind takes precedence.
        assert [registration.engine for registration in router.core.registrations()] == ["vllm"]


async def test_vllm_needs_no_writing(url: str) -> None:
    engine = EngineHttp()
    engine.pages["/kv_event_sources"] = b"{}"
    async with routing(url, asks_engines=True) as router:
        await router.core.register(written_by_hand(engine))
        async with asyncio.timeout(TIMEOUT_S):
            while not router.core.engine_lists.kinds:
                await asyncio.sleep(0.01)
        await asyncio.sleep(STILL_S)
        assert [registration.engine for registration in router.core.registrations()] == [None]
    engine.stop()
