# SPDX-License-Identifier: Apache-2.0
"""Replicas that are killed, hang, slow down, fail and restart under load, while clients send nonsense."""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.support.exchange import exchange
from tests.support.fleet import until
from tests.support.replica_process import ReplicaProcess
from tests.support.router_process import RouterProcess

WAIT_S = 60.0
CLIENTS = 8
TURNS = 60
STALL_S = 8.0
MODEL = "sim-gemma3"
REPLICA = ("--prefill-rate", "50000", "--step-ms", "1", "--decode-ms", "0.1")
# One in this many requests is a client's own mistake, which an engine or the router reports.
MISTAKES = 6
NONSENSE = (
    {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": -1},
    {"model": MODEL, "prompt": list(range(200_000)), "max_tokens": 1},
    {"model": MODEL, "prompt": {"not": "a prompt"}},
    {"model": MODEL},
)


class Conversations:
    """Clients in threads, each with its own conversation that grows with each turn."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.mistakes: Counter[int] = Counter()
        self.wrong: list[str] = []
        # The turns that each client has ended.
        self._turns = [0] * CLIENTS
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> int:
        return sum(self.outcomes.values())

    def pass_on(self) -> None:
        """Wait until every request that is under way now has been answered."""
        before = list(self._turns)
        until(
            lambda: all(now > then or now == TURNS for now, then in zip(self._turns, before, strict=True)),
            "the requests under way are answered",
        )

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        talk = [rng.randrange(10, 5_000) for _ in range(rng.randint(50, 400))]
        for turn in range(TURNS):
            if rng.randrange(MISTAKES) == 0:
                status, answer = ask(self._port, rng.choice(NONSENSE))
                with self._lock:
                    self.mistakes[status] += 1
                    if status != 400:
                        self.wrong.append(f"a mistake was answered {status}: {answer[:200]!r}")
            talk += [rng.randrange(10, 5_000) for _ in range(rng.randint(1, 40))]
            body = {"model": MODEL, "prompt": talk, "max_tokens": rng.randint(1, 12), "stream": turn % 2 == 0}
            outcome = self._turn(body)
            with self._lock:
                self.outcomes[outcome] += 1
                self._turns[number] += 1
            if len(talk) > 3_000:
                del talk[200:]

    def _turn(self, body: dict[str, object]) -> str:
        try:
            status, answer = ask(self._port, body)
        except http.client.IncompleteRead:
            return "cut"
        whole = answer.endswith(b"data: [DONE]\n\n") if body["stream"] else b'"usage"' in answer
        if status == 200 and whole:
            return "ok"
        with self._lock:
            self.wrong.append(f"{status}: {answer[:300]!r}")
        return str(status)


def ask(port: int, body: object) -> tuple[int, bytes]:
    answer = exchange(port, "POST", "/v1/completions", body)
    return answer.status, answer.content


def is_open(router: RouterProcess, name: str) -> bool:
    return not router.worker(name)["closed"]


def test_replicas_fail_in_every_way_and_no_request_is_lost(tmp_path: Path) -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(ReplicaProcess(tmp_path / f"r{n}", REPLICA)) for n in range(5)]
        workers = [part for n, replica in enumerate(replicas) for part in ("--worker", replica.spec(f"w{n}"))]
        flags = ["--health-interval-s", "0.1", *workers]
        router = stack.enter_context(RouterProcess(tmp_path / "router", flags))
        killed, hung, slowed, restarted, failing = replicas
        until(lambda: all(row["state"] == "live" for row in router.request("GET", "/workers")["workers"]), "all live")
        load = Conversations(router.port)
        total = CLIENTS * TURNS
        until(lambda: load.done > total // 10, "the load runs")
        slowed.faults(slow=5.0)
        killed.kill()
        until(lambda: load.done > total // 4, "without the killed one")
        # A request is sent to two engines at most, so one that met a fault must end before the next fault begins.
        load.pass_on()
        # The stall is longer than a request waits that could be sent elsewhere; a stream that had begun there goes on
        # afterwards.
        hung.faults(stall_s=STALL_S, unhealthy=True)
        until(lambda: load.done > total // 2, "without the hanging one")
        restarted.faults(restart=True, down_s=0.5)
        load.pass_on()
        failing.faults(fail=3, fail_status=503)
        load.join()
        print(f"outcomes {dict(load.outcomes)}, mistakes {dict(load.mistakes)}")
        # Streams that had begun at the killed replica and at the restarted one cannot be taken back.
        assert not load.wrong, "\n".join(load.wrong[:5])
        assert load.outcomes["ok"] + load.outcomes["cut"] == total
        assert load.outcomes["cut"] <= 2 * CLIENTS
        assert sum(load.mistakes.values()) > total // MISTAKES // 2
        until(
            lambda: router.worker("w0")["closed"] and router.worker("w1")["closed"], "nothing is sent where nobody is"
        )
        hung.faults(unhealthy=False)
        # The other replicas take requests again, once health checks and requests show that they are back.
        for name in ("w1", "w2", "w3", "w4"):
            until(partial(is_open, router, name), f"{name} is back")
        until(lambda: router.metric("kvrouter_reservations_held") == 0, "no load of a request that is over")


def test_nobody_is_blamed_for_a_clients_mistakes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(ReplicaProcess(tmp_path / f"r{n}", REPLICA)) for n in range(2)]
        workers = [part for n, replica in enumerate(replicas) for part in ("--worker", replica.spec(f"w{n}"))]
        router = stack.enter_context(RouterProcess(tmp_path / "router", workers))
        for _ in range(10):
            for body in NONSENSE:
                status, answer = ask(router.port, body)
                assert status == 400 and b'"error"' in answer
        assert [router.worker(name)["closed"] for name in ("w0", "w1")] == ["", ""]
        assert ask(router.port, {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1})[0] == 200


def test_an_engine_with_another_address_is_probed_there(tmp_path: Path) -> None:
    with ExitStack() as stack:
        here, there = [stack.enter_context(ReplicaProcess(tmp_path / f"r{n}", REPLICA)) for n in range(2)]
        router = stack.enter_context(RouterProcess(tmp_path / "router", ["--health-interval-s", "0.1"]))
        at = here.endpoints
        router.request(
            "POST",
            "/register",
            {
                "worker_id": "w0",
                "model": MODEL,
                "endpoint": at["events"],
                "replay_endpoint": at["replay"],
                "url": at["url"],
            },
        )
        until(lambda: router.worker("w0")["state"] == "live", "followed")
        router.request("PATCH", "/workers/w0", {"url": there.endpoints["url"]})
        here.faults(unhealthy=True)
        there.faults(unhealthy=True)
        until(lambda: there.endpoints["url"] in router.worker("w0")["closed"], "the new address counts")
        there.faults(unhealthy=False)
        # The engine at the old address is still unwell, but no longer queried.
        until(lambda: not router.worker("w0")["closed"], "it is back")
