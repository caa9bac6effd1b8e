# SPDX-License-Identifier: Apache-2.0
"""Two routers on one Redis.

They give the same answers, share the workers evenly, and take over without loss; one that was stopped changes nothing.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.index.store import keys
from tests.support.churn import Churn
from tests.support.fleet import MODEL, check, held, register, rows, until, wait_busy, wait_seqs, wait_shared
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

ENGINES = 5
RATE = 5_000.0


def test_a_router_killed_is_taken_over_and_comes_back(
    tmp_path: Path, server: StoreServer, churn: Churn, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    one, two = pair
    register(one, churn)
    churn.ask("go")
    wait_shared(pair, ENGINES)
    wait_busy(server.client, churn)
    assert check(pair, server.client, churn) > 100
    churn.ask("go")
    one.kill()
    killed = time.monotonic()
    seqs = dict(zip(churn.workers, churn.ask("seqs"), strict=True))
    wait_seqs(two, {worker: seq + 1 for worker, seq in seqs.items()})
    print(f"taken over after {time.monotonic() - killed:.2f} s")
    check([two], server.client, churn)
    churn.ask("go")
    with RouterProcess(tmp_path / "c", ["--redis", server.url]) as three:
        wait_shared([two, three], ENGINES)
        check([two, three], server.client, churn)
        for router in (two, three):
            assert router.metric("kvrouter_stream_gaps_total") == 0
            assert "Traceback" not in router.log_tail()


def test_a_router_stopped_for_longer_than_its_leases_changes_nothing_when_it_continues(
    server: StoreServer, churn: Churn, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    one, two = pair
    register(one, churn)
    churn.ask("go")
    wait_shared(pair, ENGINES)
    check(pair, server.client, churn)
    churn.ask("go")
    one.signal(signal.SIGSTOP)
    until(lambda: held(two) == ENGINES, "the stopped router's workers are not taken over")
    time.sleep(1.0)
    one.signal(signal.SIGCONT)
    lost = until(
        lambda: (
            one.metric("kvrouter_index_commits_total", outcome="fenced")
            + one.metric("kvrouter_leases_lost_total", how="taken")
        ),
        "the stopped router did not notice that it lost its leases",
    )
    print(f"fenced commits and lost leases: {lost:.0f}")
    wait_shared(pair, ENGINES)
    check(pair, server.client, churn)
    assert one.metric("kvrouter_stream_gaps_total") + two.metric("kvrouter_stream_gaps_total") == 0


def test_registrations_are_known_to_all(
    server: StoreServer, churn: Churn, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    one, two = pair
    register(one, churn)
    until(lambda: len(rows(two)) == ENGINES, "workers registered at the other router are not known", 5.0)
    two.request("POST", "/unregister", {"worker_id": "w0"})
    until(lambda: "w0" not in rows(one), "a worker unregistered at the other router is still there", 5.0)
    until(lambda: not list(server.client.scan_iter(f"{keys.PREFIX}{{{MODEL}/w0}}*")), "keys of a dropped worker stay")
    # Registering the same worker with another address is an update.
    events, replay = churn.endpoints[0]
    two.register("w1", MODEL, events, replay, patch_endpoint="off")
    churn.ask("go")
    time.sleep(0.5)
    seqs = dict(zip(churn.workers, churn.ask("pause"), strict=True))
    seqs["w1"] = seqs["w0"]
    for router in pair:
        wait_seqs(router, {worker: seqs[worker] for worker in ("w1", "w2", "w3", "w4")})

    def told(router: RouterProcess) -> list[dict[str, Any]]:
        # Only the router that follows a worker can know the other fields: lag, age of the last event, findings of
        # resyncs.
        shared = (
            "worker_id",
            "model",
            "state",
            "credited",
            "epoch",
            "seq",
            "catalog",
            "hash_scheme",
            "residency",
            "gaps",
        )
        return [{name: row[name] for name in shared} for row in rows(router).values()]

    until(lambda: told(one) == told(two), "the routers show different things", 5.0)
    assert {row["state"] for row in told(one)} == {"live"} and all(row["catalog"]["groups"] for row in told(one))


def looks(port: int, path: str, question: dict[str, Any] | None, ended: threading.Event) -> tuple[int, list[str]]:
    """Query until `ended`, and return the number of answers, with the answers that lack w0."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    count, missed = 0, []
    while not ended.is_set():
        connection.request(
            "GET" if question is None else "POST", path, None if question is None else json.dumps(question)
        )
        answer = json.loads(connection.getresponse().read())
        listed = [row["worker_id"] for row in answer["workers"]] if question is None else answer.get("instances", ())
        count += 1
        if "w0" not in listed:
            missed.append(str(answer)[:300])
    connection.close()
    return count, missed


def shows(routers: tuple[RouterProcess, ...], model: str) -> bool:
    """Return whether w0 is live at each router, as a worker of this model."""
    return all((row["model"], row["state"]) == (model, "live") for row in (rows(router)["w0"] for router in routers))


@pytest.mark.parametrize("what", ["address", "model"])
def test_a_worker_that_is_registered_again_is_never_missed(
    server: StoreServer, churn: Churn, pair: tuple[RouterProcess, RouterProcess], what: str
) -> None:
    """Register a worker again and again, while clients query both routers.

    Every answer has the worker; meanwhile no hit is predicted for it. With another model, it becomes a worker of that
    model.
    """
    register(pair[0], churn)
    churn.ask("go")
    wait_shared(pair, ENGINES)
    # Unregister w4, because w0 uses its engine every other turn.
    pair[0].unregister("w4")
    questions: list[tuple[str, dict[str, Any] | None]] = [("/workers", None)]
    if what == "address":
        questions.append(("/query", {"model": MODEL, "token_ids": list(range(64))}))
    ended = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(looks, router.port, path, question, ended) for router in pair for path, question in questions
        ]
        try:
            for turn in range(20):
                events, replay = churn.endpoints[4 * (turn % 2) if what == "address" else 0]
                model = MODEL if what == "address" else f"m{turn}"
                # Register at either router, so both at the one that follows w0 and at the other.
                pair[turn // 2 % 2].register("w0", model, events, replay, patch_endpoint="off")
                until(partial(shows, pair, model), "it is not followed again by both")
        finally:
            ended.set()
    for future in futures:
        count, missed = future.result()
        assert count > 20 and not missed, missed[:3]
    # Give each worker its own engine again, w0 first.
    register(pair[0], churn)
    check(pair, server.client, churn)
    for router in pair:
        assert "Traceback" not in router.log_tail()


def test_the_last_registration_holds_at_whichever_router_it_came(
    server: StoreServer, churn: Churn, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    """Register at a router that has not yet read what another router changed.

    The last registration holds, although its router knows only the state before the other change, and also if the store
    lost the version that announces the other change.
    """
    register(pair[0], churn)
    wait_shared(pair, ENGINES)
    pair[0].unregister("w4")
    (own, replay), (other, other_replay) = churn.endpoints[0], churn.endpoints[4]
    for number in range(10):
        pair[1].register("w0", MODEL, other, other_replay, patch_endpoint="off")
        if number % 2:
            server.client.decr(keys.REGISTRATIONS)
        pair[0].register("w0", MODEL, own, replay, patch_endpoint="off")
        stored = json.loads(server.client.hget(keys.registry(MODEL), "w0@0"))
        assert stored["events"] == own
        until(partial(shows, pair, MODEL), "it is not followed again by both")
