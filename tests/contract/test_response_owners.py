# SPDX-License-Identifier: Apache-2.0
"""The owners of responses of several processes on one Redis: the embedded Valkey, and a cluster."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from kvrouter.router.base.common.errors import Conflict, OwnerGone, StoreDown, UnknownResponse
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.store import keys
from kvrouter.router.route.owners import response_owners
from kvrouter.router.route.owners.owner_metrics import OwnerMetrics
from kvrouter.router.route.owners.response_owners import TTL_S, EngineSign, ResponseOwners
from tests.support.store_server import StoreServer

WORKER, OTHER = WorkerKey("m", "w0"), WorkerKey("m", "w1", 3)
UP = EngineSign(is_down=False, start_s=5.0)
PATIENCE_S = 20.0


class Process:
    """One process that knows owners, with the signs of the engines as it sees them."""

    def __init__(self, servers: Servers | None, max_known: int) -> None:
        self.signs: dict[WorkerKey, EngineSign] = {WORKER: UP, OTHER: UP}
        self.registry = MetricRegistry()
        self.owners = ResponseOwners(
            OwnerMetrics(self.registry),
            time.monotonic,
            engine=self.signs.get,
            servers=servers,
            supervisor=TaskSupervisor(clock=time.monotonic, rng=random.Random(0)),
            max_known=max_known,
        )
        self.owners.start()

    def counted(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvrouter_{metric}_total", labels) or 0.0

    async def find(self, response_id: str, caller: str = "") -> WorkerKey | None:
        owner = await self.owners.find(response_id, caller)
        return None if owner is None else owner.worker


@asynccontextmanager
async def processes(url: str, count: int = 2, max_known: int = 1_000) -> AsyncIterator[list[Process]]:
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            servers = await Servers.open(url)
            stack.push_async_callback(servers.close)
            process = Process(servers, max_known)
            stack.push_async_callback(process.owners.stop)
            started.append(process)
        yield started


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            await asyncio.sleep(0.01)


def stored(raw: Any) -> set[str]:
    """Return the ids of the responses in the store."""
    prefix = keys.response_owner("")
    return {name.decode().removeprefix(prefix) for name in raw.scan_iter(f"{prefix}*")}


def _has(raw: Any, response_id: str) -> bool:
    return response_id in stored(raw)


async def test_every_process_finds_what_one_of_them_made(store_url: str, raw: Any) -> None:
    async with processes(store_url) as (one, two):
        for number in range(300):
            one.owners.made(f"resp_{number}", (WORKER, OTHER)[number % 2], "alice")
        for number in range(300):
            assert await two.find(f"resp_{number}", "alice") == (WORKER, OTHER)[number % 2]
            assert await one.find(f"resp_{number}", "alice") == (WORKER, OTHER)[number % 2]
        assert (one.counted("response_lookups", outcome="here"), two.counted("response_lookups", outcome="shared")) == (
            300,
            300,
        )
        assert len(stored(raw)) == 300
        assert 0 < raw.ttl(keys.response_owner("resp_0")) <= TTL_S
        one.owners.counted("resp_0", "alice", 1_234)
        one.owners.forget("resp_1")
        await until(lambda: "resp_1" not in stored(raw) and b"1234" in raw.get(keys.response_owner("resp_0")))
        assert await one.find("resp_1", "alice") is None


async def test_a_lookup_waits_once_for_an_owner_that_is_not_written_yet(
    store_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with processes(store_url) as (one, two):
        read, has_read = two.owners._read, asyncio.Event()

        async def noted(response_id: str) -> Any:
            owner = await read(response_id)
            has_read.set()
            return owner

        monkeypatch.setattr(two.owners, "_read", noted)
        monkeypatch.setattr(response_owners, "GRACE_S", 5.0)
        lookup = asyncio.ensure_future(two.find("resp_a"))
        await has_read.wait()
        one.owners.made("resp_a", WORKER, "")
        assert await lookup == WORKER


async def test_a_response_stays_with_the_caller_that_it_was_first_made_for(store_url: str, raw: Any) -> None:
    async with processes(store_url, 3) as (one, two, three):
        one.owners.made("resp_a", WORKER, "alice")
        await until(lambda: stored(raw) == {"resp_a"})
        for process in (one, two, three):
            process.owners.made("resp_a", OTHER, "bob")
        await until(
            lambda: all(process.counted("responses_not_remembered", reason="taken") for process in (one, two, three))
        )
        for process in (one, two, three):
            assert await process.find("resp_a", "bob") is None
            assert await process.find("resp_a", "alice") == WORKER
            # A gateway's clients have no key, and an engine would give them the response.
            with pytest.raises(UnknownResponse):
                await process.find("resp_a", "")
            with pytest.raises(Conflict):
                await process.owners.check_free("resp_a", "bob")
            await process.owners.check_free("resp_a", "alice")
            await process.owners.check_free("resp_b", "bob")
        # The same caller may make it again, at another worker.
        two.owners.made("resp_a", OTHER, "alice")
        await until(lambda: b"w1" in raw.get(keys.response_owner("resp_a")))


async def test_a_process_removes_from_the_store_what_it_has_no_room_for(store_url: str, raw: Any) -> None:
    async with processes(store_url, max_known=10) as (one, two):
        for number in range(25):
            one.owners.made(f"resp_{number}", WORKER, "")
            await until(partial(_has, raw, f"resp_{number}"))
        await until(lambda: stored(raw) == {f"resp_{number}" for number in range(15, 25)})
        assert one.registry.get_sample_value("kvrouter_responses_known") == 10
        assert one.counted("responses_not_remembered", reason="room") == 15
        assert await two.find("resp_3") is None and await two.find("resp_20") == WORKER


async def test_a_response_is_gone_with_its_owner(store_url: str, raw: Any) -> None:
    async with processes(store_url) as (one, two):
        one.owners.made("resp_a", WORKER, "")
        assert await two.find("resp_a") == WORKER
        for process in (one, two):
            for sign in (None, EngineSign(True, 5.0), EngineSign(False, 6.0)):
                process.signs.pop(WORKER, None)
                if sign is not None:
                    process.signs[WORKER] = sign
                with pytest.raises(OwnerGone, match="w0"):
                    await process.find("resp_a")
            # A start time that is not known proves nothing.
            process.signs[WORKER] = EngineSign(False, None)
            assert await process.find("resp_a") == WORKER


async def test_ids_that_cannot_be_part_of_a_path_are_not_remembered(store_url: str, raw: Any) -> None:
    async with processes(store_url, 1) as (one,):
        for response_id in ("", ".", "..", "a/b", "a b", "a%2f", "é", "x" * 129, "a\n"):
            one.owners.made(response_id, WORKER, "")
            assert await one.find(response_id) is None
        assert one.counted("responses_not_remembered", reason="unusable") == 9
        one.owners.made("x" * 128, WORKER, "")
        assert await one.find("x" * 128) == WORKER


async def test_a_value_that_no_router_writes_is_no_owner(store_url: str, raw: Any) -> None:
    async with processes(store_url, 1) as (one,):
        for value in (
            b"",
            b"{}",
            b"[]",
            b'["m","w","",null,0]',
            b'["m","w@0","",null,0]',
            b"\xff",
            b'["{","w@0","",1,0]',
        ):
            raw.set(keys.response_owner("resp_a"), value)
            expected = WorkerKey("m", "w") if value == b'["m","w@0","",null,0]' else None
            one.signs[WorkerKey("m", "w")] = UP
            assert await one.find("resp_a") == expected, value
            one.owners._table.drop("resp_a")


async def test_a_store_that_is_away_takes_nothing_from_what_a_process_knows(server: StoreServer) -> None:
    async with processes(server.url, 2, max_known=50) as (one, two):
        one.owners.made("resp_before", WORKER, "")
        assert await two.find("resp_before") == WORKER
        server.kill()
        for number in range(170):
            one.owners.made(f"resp_{number}", WORKER, "")
        await until(lambda: one.owners.health())
        assert await one.find("resp_160") == WORKER and await two.find("resp_before") == WORKER
        with pytest.raises(StoreDown):
            await two.find("resp_160")
        assert two.counted("response_lookups", outcome="failed") == 1
        server.start()
        await until(lambda: not one.owners.health())
        await until(lambda: "resp_169" in stored(server.client))
        assert await two.find("resp_169") == WORKER
        assert one.counted("responses_not_remembered", reason="unwritten") > 0


async def test_a_process_without_a_store_knows_its_own_responses() -> None:
    alone = Process(None, 10)
    alone.owners.made("resp_a", WORKER, "")
    assert await alone.find("resp_a") == WORKER and await alone.find("resp_b") is None
    await alone.owners.stop()
