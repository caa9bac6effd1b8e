# SPDX-License-Identifier: Apache-2.0
"""The load that routers count, over HTTP.

It is reserved at one router, seen and ended at another, and gone with the process that reserved it.
"""

from __future__ import annotations

import concurrent.futures
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_http import EngineHttp
from tests.support.exchange import exchange
from tests.support.fleet import until
from tests.support.router_process import RouterError, RouterProcess
from tests.support.store_server import StoreServer

MODEL = "m"
WORKERS = ("w0", "w1", "w2")
TOKENS = 1_000


@pytest.fixture
def pair(pair: tuple[RouterProcess, RouterProcess]) -> tuple[RouterProcess, RouterProcess]:
    """Register the workers at the first of two routers."""
    one, two = pair
    add_workers(one)
    until(lambda: len(loads(two)) == len(WORKERS), "the second router does not know the workers")
    return pair


def add_workers(router: RouterProcess) -> None:
    for name in WORKERS:
        # Nothing listens at these addresses, because load needs no events.
        router.register(name, MODEL, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", patch_endpoint="off")


def loads(router: RouterProcess) -> dict[str, dict[str, Any]]:
    answer = router.request("GET", f"/loads?model_name={MODEL}")
    return {row["worker_id"]: row for entry in answer for row in entry["loads"]}


def queued(router: RouterProcess) -> dict[str, int]:
    return {name: row["potential_prefill_tokens"] for name, row in loads(router).items()}


def requests(router: RouterProcess) -> int:
    return sum(row["active_requests"] for row in loads(router).values())


def reserve(router: RouterProcess, seed: int, **fields: Any) -> dict[str, Any]:
    ids = [random.Random(seed).randrange(50_000) for _ in range(TOKENS)]
    answer = router.request("POST", "/select_and_reserve", {"model": MODEL, "token_ids": ids, **fields})
    return dict(answer)


def is_idle(router: RouterProcess) -> bool:
    return not requests(router) and not any(queued(router).values())


def test_prompts_spread_by_what_another_router_has_reserved(pair: tuple[RouterProcess, RouterProcess]) -> None:
    one, two = pair
    taken = [reserve(one, 1)["worker_id"], reserve(one, 2)["worker_id"]]
    until(lambda: requests(two) == 2, "the other router does not see the load")
    assert sorted([*taken, reserve(two, 3)["worker_id"]]) == sorted(WORKERS)


def test_a_reservation_ends_at_any_router(pair: tuple[RouterProcess, RouterProcess]) -> None:
    one, two = pair
    reservation = reserve(one, 1)
    name, selection_id = reservation["worker_id"], reservation["selection_id"]
    # End it at once, before the other router can have heard of it.
    assert two.request("POST", f"/reservations/{selection_id}/prefill_complete") == {"status": "ok"}
    assert (loads(one)[name]["active_requests"], queued(one)[name]) == (1, 0)
    assert two.request("DELETE", f"/reservations/{selection_id}") == {"status": "ok"}
    assert requests(one) == 0
    until(lambda: is_idle(two), "what was released still counts")
    for router in pair:
        assert exchange(router.port, "DELETE", f"/reservations/{selection_id}").status == 404
        assert exchange(router.port, "POST", f"/reservations/{selection_id}/prefill_complete").status == 404


def test_routers_agree_whatever_happens_where(pair: tuple[RouterProcess, RouterProcess]) -> None:
    rng = random.Random(7)
    open_ids: list[str] = []
    prefilling = set()
    for step in range(150):
        router = rng.choice(pair)
        if not open_ids or rng.random() < 0.5:
            reservation = reserve(router, step)
            open_ids.append(reservation["selection_id"])
            prefilling.add(reservation["selection_id"])
        elif rng.random() < 0.4 and prefilling:
            router.request("POST", f"/reservations/{prefilling.pop()}/prefill_complete")
        else:
            ended_id = open_ids.pop(rng.randrange(len(open_ids)))
            prefilling.discard(ended_id)
            router.request("DELETE", f"/reservations/{ended_id}")
    until(lambda: all(requests(router) == len(open_ids) for router in pair), "the routers count other requests")
    until(lambda: queued(pair[0]) == queued(pair[1]), "the routers see other loads")
    for number, selection_id in enumerate(open_ids):
        pair[number % 2].request("DELETE", f"/reservations/{selection_id}")
    until(lambda: all(is_idle(router) for router in pair), "load is left")


def test_the_load_of_a_killed_router_is_gone(pair: tuple[RouterProcess, RouterProcess]) -> None:
    one, two = pair
    for seed in range(6):
        reserve(one, seed)
    mine = reserve(two, 99)
    until(lambda: requests(two) == 7, "the load of the other router is not seen")
    one.kill()
    until(lambda: requests(two) == 1, "a dead router's load counts for ever")
    assert sum(queued(two).values()) == TOKENS
    two.request("DELETE", f"/reservations/{mine['selection_id']}")
    assert is_idle(two)


def test_without_the_store_each_counts_its_own_and_says_so(
    pair: tuple[RouterProcess, RouterProcess], server: StoreServer
) -> None:
    one, two = pair
    reservation = reserve(one, 1)
    until(lambda: requests(two) == 1, "the load of the other router is not seen")
    server.kill()

    def says_so() -> bool:
        return any("load of other routers is not known" in why for why in two.request("GET", "/health")["reasons"])

    until(says_so, "nothing is said of it")
    until(lambda: requests(two) == 0, "what is no longer heard still counts")
    assert exchange(two.port, "DELETE", f"/reservations/{reservation['selection_id']}").status == 503
    assert reserve(two, 2)["worker_id"] in WORKERS
    server.start()
    until(lambda: requests(one) == requests(two) == 2, "the routers do not find together again")
    assert not says_so()


def test_a_client_that_knows_only_the_selection_service(tmp_path: Path) -> None:
    """Use the field names, shapes and statuses of Dynamo's service (seen at dynamo.select_service 1.6.1)."""
    with RouterProcess(tmp_path, []) as router:
        router.request("POST", "/register", {"instance_id": 1, "model_name": MODEL, "endpoint": "tcp://127.0.0.1:9"})
        body = {"model_name": MODEL, "selection_id": "mine", "token_ids": list(range(TOKENS)), "allowed_worker_ids": [1],
                "expected_output_tokens": 100, "routing_constraints": {}}  # fmt: skip
        chosen = router.request("POST", "/select_and_reserve", body)
        assert (chosen["selection_id"], chosen["worker_id"], chosen["dp_rank"]) == ("mine", 1, 0)
        assert (chosen["effective_prefill_tokens"], chosen["isl_tokens"]) == (TOKENS, TOKENS)
        with pytest.raises(RouterError, match="409"):
            router.request("POST", "/select_and_reserve", body)
        (entry,) = router.request("GET", "/loads")
        assert (entry["model_name"], entry["pending_count"], entry["pending_isl_tokens"]) == (MODEL, 0, 0)
        (load,) = entry["loads"]
        assert (load["potential_prefill_tokens"], load["active_requests"]) == (TOKENS, 1)
        assert load["potential_decode_blocks"] == -(-(TOKENS + 50) // 16)
        assert router.request("GET", "/loads?model_name=other") == []
        for _ in range(2):
            assert router.request("POST", "/reservations/mine/prefill_complete") == {"status": "ok"}
        booked = {"selection_id": "other", "worker_id": 1, "model_name": MODEL, "token_ids": list(range(64))}
        assert exchange(router.port, "POST", "/reservations", booked).status == 201
        assert queued(router) == {1: 64}
        for selection_id in ("mine", "other"):
            assert router.request("DELETE", f"/reservations/{selection_id}") == {"status": "ok"}
        assert exchange(router.port, "DELETE", "/reservations/mine").status == 404
        assert is_idle(router)


def test_saturated_workers_take_no_reservation_and_say_when_to_come_again(tmp_path: Path) -> None:
    with RouterProcess(tmp_path, ["--saturation-tokens", "500"]) as router:
        add_workers(router)
        for seed in range(len(WORKERS)):
            reserve(router, seed)
        answer = exchange(router.port, "POST", "/select_and_reserve", {"model": MODEL, "token_ids": [1] * TOKENS})
        assert (answer.status, answer.json()["error"]["code"]) == (503, "saturated")
        assert int(answer.headers["retry-after"]) >= 1
        chosen = router.request("POST", "/select", {"model": MODEL, "token_ids": [1] * TOKENS})
        assert chosen["reason"].endswith("all workers are saturated")


def test_an_engines_own_numbers_count_what_came_by_other_ways(tmp_path: Path) -> None:
    busy, idle = EngineHttp(), EngineHttp()
    busy.running, busy.waiting = 12, 8
    with RouterProcess(tmp_path, ["--health-interval-s", "0.1"]) as router:
        for name, engine in (("busy", busy), ("idle", idle)):
            router.request(
                "POST",
                "/register",
                {"worker_id": name, "model": MODEL, "endpoint": "tcp://127.0.0.1:9", "url": engine.url},
            )
        until(lambda: queued(router).get("busy", 0) > 1_000, "what waits at the engine does not count")
        assert loads(router)["busy"]["engine"]["waiting"] == 8
        assert all(reserve(router, seed)["worker_id"] == "idle" for seed in range(3))
        # Nobody ends these reservations; the engine reports that it has no request.
        until(lambda: loads(router)["idle"]["active_requests"] == 0, "an idle engine's reservations count for ever")
        assert router.metric("kvrouter_reservations_voided_total") == 3
    busy.stop()
    idle.stop()


def test_several_processes_behind_one_port_are_one(tmp_path: Path) -> None:
    with RouterProcess(tmp_path, ["--processes", "3", "--data-dir", str(tmp_path / "data")]) as router:
        until(lambda: router.log_tail().count("listens on"), "no line says that it listens")
        add_workers(router)

        def one(seed: int) -> str:
            reservation: dict[str, Any] = {}

            def answered() -> bool:
                body = {"model": MODEL, "token_ids": [seed] * TOKENS}
                reservation.update(exchange(router.port, "POST", "/select_and_reserve", body).json())
                return "selection_id" in reservation

            # A process may not have heard of the workers yet.
            until(answered, f"not reserved: {reservation}")
            return str(reservation["selection_id"])

        def end(selection_id: str) -> int:
            return exchange(router.port, "DELETE", f"/reservations/{selection_id}").status

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            selection_ids = list(pool.map(one, range(60)))
            until(lambda: agree(router, 60), "the processes count differently")
            assert set(pool.map(end, selection_ids)) == {200}
        until(lambda: agree(router, 0), "load is left")


def agree(router: RouterProcess, count: int) -> bool:
    """Return whether the processes count this number of requests.

    Connections are spread over the processes, so some of many reach each one.
    """
    for _ in range(12):
        router.reconnect()
        if requests(router) != count:
            return False
    return True
