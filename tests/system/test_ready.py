# SPDX-License-Identifier: Apache-2.0
"""`/ready` says yes only while a request would be placed, as `/select` finds.

`kvrouter workers` says of each worker why none is placed there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.exchange import exchange, run_cli
from tests.support.fake_engine import BLOCK, FakeEngine, stored
from tests.support.fleet import until
from tests.support.replica_process import ReplicaProcess
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import ScriptedEngine, plain

# A chat of some blocks.
MESSAGES = [{"role": "user", "content": "hi " * 200}]


ROUTER_FLAGS = ["--health-interval-s", "0.1"]


class Fleet:
    """The engines of one model, by name; their registrations end with the test."""

    def __init__(self, router: RouterProcess, stack: ExitStack, model: str) -> None:
        self.router, self._stack, self.model = router, stack, model
        self.engines: dict[str, ScriptedEngine] = {}

    def register(self, name: str, **fields: Any) -> None:
        self.router.request("POST", "/register", {"worker_id": name, "model": self.model, **fields})
        self._stack.callback(self.router.request, "POST", "/unregister", {"worker_id": name})

    def engine(self, name: str, **fields: Any) -> ScriptedEngine:
        engine = self.engines[name] = self._stack.enter_context(ScriptedEngine(plain(b"{}")))
        self.register(name, url=engine.url, **fields)
        return engine

    def ready(self) -> tuple[bool, str]:
        """Return whether the router is ready, or else why not; check that `/select` finds the same."""
        status, answer = self._ask("GET", "/ready")
        placed, _ = self._ask("POST", "/select", {"model": self.model, "token_ids": [1, 2, 3]})
        assert (status == 200) == (placed == 200), (status, answer, placed)
        return status == 200, "" if status == 200 else answer["error"]["message"]

    def chat(self) -> int:
        return self._ask("POST", "/v1/chat/completions", {"model": self.model, "messages": MESSAGES, "max_tokens": 2})[
            0
        ]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        answer = exchange(self.router.port, method, path, body)
        return answer.status, answer.json()

    def shown(self) -> str:
        """Return the table of workers with all columns, each row on one line."""
        return self.command("workers", "--wide")

    def command(self, *arguments: str) -> str:
        environment = {**os.environ, "KVROUTER_URL": f"localhost:{self.router.port}"}
        return run_cli(*arguments, check=True, env=environment).stdout


@pytest.fixture
def fleet(router: RouterProcess, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(router, stack, request.node.name)


def live(fleet: Fleet, *names: str) -> None:
    """Wait until the engines' health checks were answered.

    An engine that has never answered is not missed when it goes.
    """
    for name in names:
        # The second health check is not sent before the first is answered.
        until(lambda name=name: fleet.engines[name].looked.count("/health") > 1, name)  # type: ignore[misc]


def test_it_is_ready_while_an_engine_lives_and_not_longer(fleet: Fleet) -> None:
    one, two = fleet.engine("w0"), fleet.engine("w1")
    live(fleet, "w0", "w1")
    assert fleet.ready() == (True, "")
    one.kill()
    until(lambda: fleet.router.worker("w0")["state"] == "down", "w0 is seen to be gone")
    assert fleet.ready()[0]
    two.kill()
    until(lambda: fleet.router.worker("w1")["state"] == "down", "w1 is seen to be gone")
    is_ready, why = fleet.ready()
    assert not is_ready and "w0: " in why and "w1: " in why and "the engine is gone" in why
    # Figures of a dead worker are not kept.
    assert fleet.router.worker("w1")["lag_ms"] is None


def test_it_is_not_ready_while_all_drain(fleet: Fleet) -> None:
    for name in ("w0", "w1"):
        fleet.engine(name)
        (line,) = fleet.command("drain", name).splitlines()
        assert line.startswith(f"{name} (model {fleet.model}) drains: it gets no new requests; none is in flight")
    is_ready, why = fleet.ready()
    assert not is_ready and "w0: it is draining" in why and "w1: it is draining" in why
    assert fleet.shown().count(", draining") == 2
    assert "w1 (model" in fleet.command("undrain", "w1")
    assert fleet.ready()[0] and fleet.shown().count(", draining") == 1


def test_it_is_not_ready_while_all_breakers_are_open(fleet: Fleet) -> None:
    engine = fleet.engine("w0")
    live(fleet, "w0")
    engine.script = plain(b"{}", "500 Oh")

    def paused_s() -> float:
        """Let one more try fail, which doubles the pause, and return the pause in seconds."""
        fleet.chat()
        _, _, rest = fleet.router.worker("w0")["closed"].partition("not tried for ")
        return float(rest.partition(" s")[0] or 0)

    # Wait for a pause that is long enough to look at the router meanwhile.
    until(lambda: paused_s() > 3.0, "its breaker is open")
    is_ready, why = fleet.ready()
    assert not is_ready and "failures in a row, the last: it answers 500" in why

    def shown_open() -> bool:
        # Send a request that fails, as the pause may be over by now.
        fleet.chat()
        table = fleet.shown()
        return "breaker open" in table and "it answers 500" in table

    until(shown_open, "it is shown")
    engine.script = plain(b"{}")
    until(lambda: fleet.chat() == 200, "it is tried again")
    assert fleet.ready()[0] and "breaker open" not in fleet.shown()
    assert fleet.router.worker("w0")["closed"] == ""


def test_it_is_not_ready_with_workers_that_only_compute_prompts(fleet: Fleet) -> None:
    assert not fleet.ready()[0]
    fleet.engine("p0", role="prefill")
    is_ready, why = fleet.ready()
    assert not is_ready and "p0: role prefill" in why
    # A gateway sends /select, and goes to the worker itself.
    fleet.register("w0", endpoint="tcp://127.0.0.1:9", replay_endpoint="tcp://127.0.0.1:10")
    assert fleet.ready()[0]


def test_a_dead_worker_has_no_lag(fleet: Fleet, tmp_path: Path) -> None:
    with ReplicaProcess(tmp_path, ["--instant", "--model", fleet.model]) as replica:
        at = replica.endpoints
        fleet.register("w0", url=at["url"], endpoint=at["events"], replay_endpoint=at["replay"])
        fleet.router.wait_connected("w0")
        assert fleet.chat() == 200
        until(lambda: fleet.router.worker("w0")["lag_ms"] is not None, "its events are timed")
        name = "kvrouter_stream_event_lag_seconds"
        assert fleet.router.metric(name, worker="w0") > 0
        replica.kill()
        until(lambda: fleet.router.worker("w0")["state"] == "down", "it is seen to be gone")
        assert fleet.router.worker("w0")["lag_ms"] is None and fleet.router.metric(name, worker="w0") == 0
        (row,) = [line for line in fleet.shown().splitlines() if "down" in line and "the engine" in line]
        assert " ms" not in row


def test_an_engine_that_has_stored_nothing_yet_degrades_nothing_and_blocks_of_no_known_group_do(
    router: RouterProcess,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = FakeEngine(context)
    prompt = list(range(2 * BLOCK))

    def row() -> dict[str, Any]:
        (worker_row,) = router.request("GET", "/workers")["workers"]
        return dict(worker_row)

    try:
        router.request("POST", "/register", engine.registration("fresh", "m-fresh", patch_endpoint="off"))
        until(lambda: row()["state"] == "live", "it is not live")
        # The engine's groups are known from its first event on.
        assert router.request("GET", "/health")["reasons"] == []
        engine.publish(stored(prompt, 0, 1, kind=None))
        until(lambda: row()["residency"], "its block is not taken")
        (reason,) = router.request("GET", "/health")["reasons"]
        assert reason.startswith("worker fresh (rank 0) is live: ") and row()["catalog"]["problem"] in reason
        engine.publish(stored(prompt, 1, 2))
        until(lambda: row()["catalog"]["problem"] is None, "its group is not known")
        assert router.request("GET", "/health")["reasons"] == []
    finally:
        router.request("POST", "/unregister", {"worker_id": "fresh"})
        engine.close()
        context.destroy(linger=0)
