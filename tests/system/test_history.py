# SPDX-License-Identifier: Apache-2.0
"""The history of two routers, one of them with two processes, equals what all of their counters counted."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvrouter.router.index.store import keys
from kvrouter.router.observe.history.history import MINUTE_S
from tests.support.exchange import run_cli
from tests.support.fleet import until
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterError, RouterProcess
from tests.support.store_server import StoreServer

# The counters, and the names of their sums in the history.
COUNTED = {
    "kvrouter_proxy_requests_total": "requests",
    "kvrouter_delivered_cached_tokens_total": "delivered_tokens",
    "kvrouter_predicted_cached_tokens_total": "predicted_tokens",
    "kvrouter_achievable_hit_tokens_total": "possible_tokens",
    "kvrouter_chosen_hit_tokens_total": "chosen_tokens",
}
# Some prompts in each round: prompts have common beginnings, so that tokens are reused.
PROMPTS = 24
# A step of 5 s, its write, its read, and a busy machine.
SHOWN_S = 60.0


def counters(*routers: RouterProcess) -> Counter[str]:
    """Return the sums of the counters over all processes of the routers; each page has all processes of one."""
    sums: Counter[str] = Counter()
    for router in routers:
        for name, labels, value in re.findall(r"^(\w+)(?:{(.*)})? (\S+)$", router.text("/metrics"), re.M):
            if name in COUNTED:
                sums[COUNTED[name]] += int(float(value))
            if name == "kvrouter_proxy_requests_total" and re.search('outcome="(server_error|cut|bug)"', labels):
                sums["failed"] += int(float(value))
    return sums


def send(router: RouterProcess, rng: Random) -> None:
    """Send prompts, some streamed, some without usage, and one that names no model of the fleet."""
    beginning = [rng.randrange(10, 50_000) for _ in range(600)]
    for number in range(PROMPTS):
        prompt = beginning[: rng.randint(200, 600)] + [rng.randrange(10, 50_000) for _ in range(20)]
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        if number % 3:
            body |= {"stream": True, "stream_options": {"include_usage": number % 3 == 1}}
        router.text("/v1/completions", body)
        router.reconnect()
    with pytest.raises(RouterError, match="404"):
        router.request("POST", "/v1/completions", {"model": "unknown", "prompt": [1, 2, 3]})


def reserve(router: RouterProcess, rng: Random) -> None:
    """Choose a worker for a prompt, and report the end of its request."""
    prompt = [rng.randrange(10, 50_000) for _ in range(300)]
    chosen = router.request("POST", "/select_and_reserve", {"model": MODEL, "token_ids": prompt})
    router.request("DELETE", f"/reservations/{chosen['selection_id']}")


def sums(answer: dict[str, Any]) -> dict[str, int]:
    """Return the totals that counters have, after a comparison with the steps."""
    for name in (*COUNTED.values(), "failed", "prompt_tokens"):
        assert sum(answer["series"][name]) == answer["totals"][name]
    return {name: answer["totals"][name] for name in (*COUNTED.values(), "failed")}


def wait_equal(
    routers: Iterable[RouterProcess], wanted: Counter[str], span: str = "1h", shown_s: float = SHOWN_S
) -> None:
    """Wait until each process of the routers shows these sums."""
    for router in routers:
        for _ in range(4):
            shown: dict[str, int] = {}

            def is_equal(router: RouterProcess = router, shown: dict[str, int] = shown) -> bool:
                shown |= sums(router.request("GET", f"/history?range={span}"))
                return shown == {name: wanted[name] for name in shown}

            until(is_equal, f"{shown}, not {wanted}", shown_s)
            router.reconnect()


def test_the_history_equals_the_counters_of_all_processes(tmp_path: Path, server: StoreServer) -> None:
    rng = Random(3)
    with replicas(2, "--shape", "llama") as endpoints:
        flags = ["--redis", server.url, *worker_flags(endpoints)]
        with RouterProcess(tmp_path / "a", [*flags, "--processes", "2"]) as one:
            with RouterProcess(tmp_path / "b", flags) as two:
                for router in (one, two):
                    send(router, rng)
                    reserve(router, rng)
                wanted = counters(one, two)
                # Choices whose end was reported have no counter of their own.
                wanted["requests"] += 2
                wait_equal((one, two), wanted)
                assert wanted["requests"] == 2 * (PROMPTS + 1) + 2 and wanted["delivered_tokens"] > 0
                answer = two.request("GET", "/history?range=15m")
                assert answer["models"] == [MODEL, "other"]
                assert answer["totals"]["ttft_p50_s"] > 0 and answer["totals"]["prompt_tokens"] > 0
                assert two.request("GET", "/history?model=other")["totals"]["requests"] == 2
                earlier = counters(two)
                send(two, rng)
                earlier_and_last = counters(two) - earlier + wanted
            # A router that ends writes what it counted last; one that begins reads what there is.
            with RouterProcess(tmp_path / "b", flags) as two:
                send(two, rng)
                everything = earlier_and_last + counters(two)
                wait_equal((one, two), everything)
                (day,) = until(
                    lambda: [
                        row
                        for row in two.request("GET", f"/savings?model={MODEL}")["days"]
                        if row["requests"] == 4 * PROMPTS + 2
                    ],
                    "the day's sums",
                    SHOWN_S,
                )
                assert day["prompt_tokens"] > day["reused_tokens"] >= everything["delivered_tokens"]
                assert 0 < day["round_robin_tokens"] < day["prompt_tokens"] and day["saved_s"] >= 0
                shown = run_cli("savings", "--url", f"127.0.0.1:{two.port}", "--since", "1d")
                assert shown.returncode == 0 and MODEL in shown.stdout and "were not computed" in shown.stdout
                assert "Traceback" not in one.log_tail() + two.log_tail()


@pytest.mark.slow
def test_the_minutes_of_a_day_equal_the_counters_of_all_processes(tmp_path: Path, server: StoreServer) -> None:
    # tests/contract/test_history_log.py has 25 hours of them.
    rng = Random(6)
    with replicas(1, "--shape", "llama") as endpoints:
        flags = ["--redis", server.url, *worker_flags(endpoints)]
        with (
            RouterProcess(tmp_path / "a", [*flags, "--processes", "2"]) as one,
            RouterProcess(tmp_path / "b", flags) as two,
        ):
            for router in (one, two):
                send(router, rng)
            # A minute is shown when it has ended.
            wait_equal((one, two), counters(one, two), "24h", MINUTE_S + SHOWN_S)


def test_the_history_continues_without_redis_and_catches_up(tmp_path: Path) -> None:
    rng = Random(4)
    # The data survives the stop, as that of a server that keeps an append-only file.
    with (
        StoreServer(tmp_path / "store", "--appendonly", "yes") as server,
        replicas(1, "--shape", "llama") as endpoints,
    ):
        flags = ["--redis", server.url, *worker_flags(endpoints)]
        with RouterProcess(tmp_path / "a", flags) as one, RouterProcess(tmp_path / "b", flags) as two:
            send(one, rng)
            wait_equal((one, two), counters(one, two))
            server.kill()
            send(one, rng)
            # This router's own counts show, while it cannot hear the other's.
            wait_equal((one,), counters(one))
            send(two, rng)
            server.start()
            wanted = counters(one, two)
            wait_equal((one, two), wanted)
            # Foreign entries are left out, and counted.
            for key in (keys.HISTORY_STEPS, keys.HISTORY_MINUTES):
                server.client.xadd(key, {"x": "y"})
                server.client.xadd(key, {"m": b"\x00\xff"})
            until(
                lambda: one.metric("kvrouter_history_entries_lost_total", reason="damaged") == 4, "they count", SHOWN_S
            )
            wait_equal((one, two), wanted)
            # After the loss of all data, what the processes remember stays.
            server.client.flushall()
            time.sleep(2.0)
            send(two, rng)
            wait_equal((one, two), counters(one, two))
