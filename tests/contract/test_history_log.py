# SPDX-License-Identifier: Apache-2.0
"""The laws of the history in Redis: each count once, whatever is lost, damaged or late.

They hold on the embedded Valkey and on a cluster.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from kvrouter.contract.history import SavedDay
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoreUnavailable
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.store import keys
from kvrouter.router.observe.history import history_keeper
from kvrouter.router.observe.history.history import FINE_STEP_S, MINUTE_S, RANGE_S, SETTLE_S
from kvrouter.router.observe.history.history_entry import MAX_MODELS, OTHER, HistoryEntry, ModelStep
from kvrouter.router.observe.history.history_keeper import HistoryKeeper
from kvrouter.router.observe.history.history_log import ENTRIES_PER_READ, HistoryLog
from kvrouter.router.observe.history.history_metrics import HistoryMetrics
from kvrouter.router.observe.history.saved_days import last_days, models_in
from kvrouter.router.observe.history.shadow_cache import WorkerCache
from kvrouter.router.observe.history.unwritten import Unwritten
from kvrouter.router.route.load.traffic_sums import TrafficSums

LOST = "kvrouter_history_entries_lost_total"
BEGAN_S = 1_800_000_000
DAY = "2027-01-15"
# All sums of a day, by column.
SUMS = (3, 100, 60, 20, 1_500_000)


class LossyServers(Servers):
    """Servers that lose the answer to one request, or the request itself."""

    loses_answer = loses_request = False

    async def on(self, key: str, work: Callable[[Connection], Awaitable[Any]], *, urgent: bool = False) -> Any:
        if key.startswith(keys.history_writer("")) and self.loses_request:
            self.loses_request = False
            raise StoreUnavailable("the request was lost")
        result = await super().on(key, work, urgent=urgent)
        if key.startswith(keys.history_writer("")) and self.loses_answer:
            self.loses_answer = False
            raise StoreUnavailable("the answer was lost")
        return result


class Writer:
    """One process: what it writes, and what it reads of the others."""

    def __init__(self, servers: LossyServers, name: str) -> None:
        self.servers = servers
        self.unwritten = Unwritten(name)
        self.registry = MetricRegistry()
        self.read: Counter[tuple[int, int, str]] = Counter()
        self.times: list[float] = []
        self.log = HistoryLog(
            servers,
            self.unwritten,
            self._take,
            HistoryMetrics(self.registry),
            time.monotonic,
            lambda store_s, clock_s: self.times.append(store_s),
        )

    def _take(self, step_s: int, entry: HistoryEntry) -> bool:
        for sums in entry.models:
            self.read[step_s, entry.start_s, sums.model] += sums.requests
        return True

    def lost(self, reason: str) -> float:
        return self.registry.get_sample_value("kvrouter_history_entries_lost_total", {"reason": reason}) or 0.0

    def count(self, requests: int, number: int = 0, model: str = "m") -> None:
        sums = ModelStep(model, requests, 0, 0, 0, 0, 0, 0, 0, ttft=[3, requests])
        for step_s in (FINE_STEP_S, MINUTE_S):
            self.unwritten.add(step_s, BEGAN_S + number * step_s, sums)

    async def write(self) -> None:
        await self.log.write(float("inf"))


@asynccontextmanager
async def writers(url: str, *names: str) -> AsyncIterator[list[Writer]]:
    opened = [await LossyServers.open(url) for _ in names]
    try:
        yield [Writer(servers, name) for servers, name in zip(opened, names, strict=True)]  # type: ignore[arg-type]
    finally:
        for servers in opened:
            await servers.close()


async def test_each_process_reads_what_the_others_wrote_and_a_new_life_reads_all(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a", "b", "a again") as (one, two, again):
        for number in range(2 * ENTRIES_PER_READ + 5):
            one.count(1, number)
        await one.write()
        two.count(5)
        await two.write()
        await one.log.read()
        assert one.read == {(step_s, BEGAN_S, "m"): 5 for step_s in (FINE_STEP_S, MINUTE_S)}
        for process in (two, again):
            await process.log.read()
            await process.log.read()
        assert two.read.total() == 2 * (2 * ENTRIES_PER_READ + 5)
        assert again.read.total() == two.read.total() + 10
    assert all(raw.ttl(key) > 0 for key in (keys.HISTORY_STEPS, keys.HISTORY_MINUTES, keys.history_writer("a")))


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_batch_counts_once_whatever_is_lost(lost: str, store_url: str, raw: Any) -> None:
    async with writers(store_url, "a", "b") as (one, two):
        for round_number in range(3):
            one.count(1)
            one.unwritten.add_day(DAY, "m", SUMS)
            setattr(one.servers, f"loses_{lost}", True)
            with pytest.raises(StoreUnavailable):
                await one.write()
            one.count(10)
            await one.write()
            await two.log.read()
            assert two.read[FINE_STEP_S, BEGAN_S, "m"] == 11 * (round_number + 1)
        assert await two.log.savings([DAY]) == [SavedDay(DAY, "m", 9, 300, 180, 60, 4.5)]


async def test_a_stream_that_is_there_again_after_a_loss_counts_once(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a", "b", "c") as (one, two, three):
        three.count(4, 2)
        await three.write()
        ((_, unread),) = raw.xrange(keys.HISTORY_STEPS)
        raw.flushall()
        one.count(1)
        await one.write()
        await two.log.read()
        ((_, read),) = raw.xrange(keys.HISTORY_STEPS)
        raw.flushall()
        # The clock of the server that took over is behind.
        for number, fields in enumerate((read, unread, read, unread)):
            raw.xadd(keys.HISTORY_STEPS, fields, id=f"5-{number}")
        await two.log.read()
        one.count(2, 1)
        await one.write()
        await two.log.read()
        assert [two.read[FINE_STEP_S, BEGAN_S + at * FINE_STEP_S, "m"] for at in range(3)] == [1, 2, 4]


async def test_foreign_entries_are_left_out_and_counted(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a", "b") as (one, two):
        one.count(1)
        await one.write()
        ((_, fields),) = raw.xrange(keys.HISTORY_STEPS)
        (data,) = fields.values()
        for foreign in ({"x": data}, {"m": data[:-1]}, {"m": b""}, {"m": data, "n": data}):
            raw.xadd(keys.HISTORY_STEPS, foreign)
        one.count(2)
        await one.write()
        await two.log.read()
        assert two.read[FINE_STEP_S, BEGAN_S, "m"] == 3 and two.lost("damaged") == 4


async def test_sums_of_a_day_outlive_foreign_values(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a") as (one,):
        raw.hset(keys.savings(DAY), keys.savings_field("m", "requests"), "many")
        raw.hset(keys.savings(DAY), mapping={"x": "1", keys.savings_field("m", "foreign"): "1"})
        one.unwritten.add_day(DAY, "m", SUMS)
        await one.write()
        assert one.lost("damaged") == 1
        assert await one.log.savings([DAY, "2027-01-14"]) == [SavedDay(DAY, "m", 3, 100, 60, 20, 1.5)]
        assert one.lost("damaged") == 3
        raw.delete(keys.savings(DAY))
        raw.set(keys.savings(DAY), "text")
        assert await one.log.savings([DAY]) == []
        one.unwritten.add_day(DAY, "m", SUMS)
        await one.write()
        assert await one.log.savings([DAY]) == [SavedDay(DAY, "m", 3, 100, 60, 20, 1.5)]
        assert raw.ttl(keys.savings(DAY)) > 0


async def test_a_sum_that_redis_refuses_twice_is_dropped(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a") as (one,):
        # More than Redis can add.
        one.unwritten.add_day(DAY, "m", (1, 2**63, 0, 0, 0))
        await one.write()
        assert (one.lost("damaged"), one.lost("unwritten")) == (1, 1)
        one.unwritten.add_day(DAY, "m", SUMS)
        await one.write()
        assert await one.log.savings([DAY]) == [SavedDay(DAY, "m", 4, 100, 60, 20, 1.5)]
        assert (one.lost("damaged"), one.lost("unwritten")) == (1, 1)


async def test_a_day_has_at_most_16_models_and_other_whoever_writes(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a", "b") as (one, two):
        for process, prefix in ((one, "a/ä:{}"), (two, "b")):
            for number in range(MAX_MODELS - 2):
                process.unwritten.add_day(DAY, f"{prefix}{number}", SUMS)
            await process.write()
        rows = await one.log.savings([DAY])
        assert len(rows) == MAX_MODELS + 1 and rows[-1].model == OTHER
        assert sum(row.requests for row in rows) == 2 * (MAX_MODELS - 2) * SUMS[0]
        assert len(models_in(raw.hkeys(keys.savings(DAY)))) == MAX_MODELS + 1


async def test_old_entries_are_trimmed(store_url: str, raw: Any) -> None:
    async with writers(store_url, "a") as (one,):
        for number in range(400):
            raw.xadd(keys.HISTORY_STEPS, {"m": "x"}, id=f"{number + 1}-0")
        one.count(1)
        await one.write()
        await one.log.trim(time.time())
        assert raw.xlen(keys.HISTORY_STEPS) < 200


@asynccontextmanager
async def started_keeper(
    url: str,
    traffic: TrafficSums,
    registry: MetricRegistry,
    caches: Callable[[], Mapping[str, Sequence[WorkerCache]]] = dict,
) -> AsyncIterator[HistoryKeeper]:
    servers = await Servers.open(url)
    keeper = HistoryKeeper(
        traffic,
        writer="keeper",
        clock=time.monotonic,
        wall_clock=lambda: 1_000.0,
        caches=caches,
        metrics=HistoryMetrics(registry),
        servers=servers,
        supervisor=TaskSupervisor(clock=time.monotonic, rng=random.Random(0)),
    )
    try:
        keeper.start()
        yield keeper
    finally:
        await keeper.stop()
        await servers.close()


async def test_the_steps_are_those_of_redis_clock(store_url: str, raw: Any) -> None:
    async with started_keeper(store_url, TrafficSums(), MetricRegistry()) as keeper:
        while keeper.now() < BEGAN_S // 2:
            await asyncio.sleep(0.01)
        assert abs(keeper.now() - time.time()) < MINUTE_S


async def test_only_entries_ahead_of_redis_clock_count_as_lost(store_url: str, raw: Any) -> None:
    now_s = int(time.time()) // MINUTE_S * MINUTE_S
    async with writers(store_url, "a") as (one,):
        # Trimming leaves some of the entries that are older than the longest range.
        for start_s in (now_s - 3 * RANGE_S[FINE_STEP_S], now_s + RANGE_S[FINE_STEP_S], now_s - MINUTE_S):
            one.unwritten.add(FINE_STEP_S, start_s, ModelStep("m", 1, 0, 0, 0, 0, 0, 0, 0, ttft=[]))
            await one.write()
        registry = MetricRegistry()
        async with started_keeper(store_url, TrafficSums(), registry) as keeper:
            while keeper.reply(RANGE_S[FINE_STEP_S], None).totals.requests == 0:
                await asyncio.sleep(0.01)
            assert registry.get_sample_value("kvrouter_history_entries_lost_total", {"reason": "time"}) == 1


async def test_a_stop_follows_all_prompts_and_other_tasks_continue(
    store_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each prompt takes a turn.
    monkeypatch.setattr(history_keeper, "FOLLOW_TURN_S", 0.0)
    monkeypatch.setattr(history_keeper, "FOLLOW_S", 0.01)
    traffic, began, prompts = TrafficSums(), asyncio.Event(), 500
    followed: set[int] = set()

    def caches() -> Mapping[str, Sequence[WorkerCache]]:
        began.set()
        return {}

    async def watch() -> None:
        while True:
            followed.add(traffic.of("m").round_robin_tokens)
            await asyncio.sleep(0)

    async with started_keeper(store_url, traffic, MetricRegistry(), caches):
        for _ in range(prompts):
            traffic.answered(WorkerKey("m", "w0", 0), [], 100, 1)
        await began.wait()
        # The follower has a part of them.
        for _ in range(prompts):
            traffic.answered(WorkerKey("m", "w0", 0), [], 100, 1)
        watching = asyncio.create_task(watch())
    watching.cancel()
    assert len(followed) > prompts
    async with writers(store_url, "a") as (one,):
        rows = await one.log.savings(last_days(time.time(), 2))
        assert sum(row.reused_tokens for row in rows) == 2 * prompts
        assert sum(row.round_robin_tokens for row in rows) == 2 * prompts


class VirtualProcess:
    """A process of a router whose clock a test sets, with the counters that it would show on /metrics."""

    def __init__(self, servers: Servers, name: str, clock: VirtualClock) -> None:
        self.traffic = TrafficSums()
        self.registry = MetricRegistry()
        self.counters: Counter[str] = Counter()
        self.keeper = HistoryKeeper(
            self.traffic,
            writer=name,
            clock=clock,
            wall_clock=clock,
            metrics=HistoryMetrics(self.registry),
            servers=servers,
        )
        assert self.keeper._log is not None
        self.log = self.keeper._log

    def count(self, rng: random.Random, model: str) -> None:
        """Count some requests, in the counters and in the sums of the history."""
        sums = self.traffic.of(model)
        for name in ("requests", "failed", "prompt_tokens", "delivered_tokens", "predicted_tokens"):
            number = rng.randrange(1_000)
            setattr(sums, name, getattr(sums, name) + number)
            self.counters[name] += number

    def lost(self) -> float:
        reasons = ("damaged", "time", "unwritten")
        return sum(self.registry.get_sample_value(LOST, {"reason": reason}) or 0.0 for reason in reasons)


class VirtualClock:
    """The time of day and the monotonic time of a test."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_each_range_equals_the_difference_of_all_counters_for_25_hours(embedded_url: str) -> None:
    client = redis.Redis.from_url(embedded_url)
    client.flushall()
    rng, clock = random.Random(5), VirtualClock()
    # The end is the present time of Redis, because the ids of its entries have that time.
    hours, end_s = 25, int(time.time()) // MINUTE_S * MINUTE_S
    clock.now_s = began_s = end_s - hours * 3_600
    # The counters of all processes at the end of each step of 5 s.
    counted: dict[int, Counter[str]] = {began_s: Counter()}
    servers = await Servers.open(embedded_url)
    try:
        one, two = (VirtualProcess(servers, name, clock) for name in ("a", "b"))
        for start_s in range(began_s, end_s, FINE_STEP_S):
            for process in (one, two):
                # Hours without traffic, and models that come and go.
                hour = (start_s - began_s) // 3_600
                if hour % 5 and rng.random() < 0.4:
                    process.count(rng, f"m{hour // 2 % 3}")
            clock.now_s = start_s + FINE_STEP_S
            for process in (one, two):
                process.keeper.take(start_s)
            counted[start_s + FINE_STEP_S] = one.counters + two.counters
            # Some writes are late by up to twenty minutes, and some reads by more.
            for process in (one, two):
                if rng.random() < 1 / 240:
                    await process.log.write(clock.now_s)
                if rng.random() < 1 / 360:
                    await process.log.read()
        for process in (one, two):
            await process.log.write(clock.now_s)
            await process.log.trim(clock.now_s)
        started_later = VirtualProcess(servers, "c", clock)
        clock.now_s += SETTLE_S
        for process in (one, two, started_later):
            await process.log.read()
            for range_s in (900, 3_600, 86_400):
                totals = process.keeper.reply(range_s, None).totals
                wanted = counted[end_s] - counted[end_s - range_s]
                assert {name: getattr(totals, name) for name in wanted} == dict(wanted), range_s
                assert wanted["requests"] > 0
            assert process.lost() == 0
        series = started_later.keeper.reply(86_400, None).series
        steps = zip(range(end_s - 86_400, end_s, MINUTE_S), series.requests, strict=True)
        assert all(
            shown == counted[start_s + MINUTE_S]["requests"] - counted[start_s]["requests"] for start_s, shown in steps
        )
    finally:
        await servers.close()
        client.flushall()
        client.close()
