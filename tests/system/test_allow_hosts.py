# SPDX-License-Identifier: Apache-2.0
"""A running router connects to no host that its setting allow_hosts leaves out, whoever names it."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
import zmq

from kvrouter.router.index.store import keys
from tests.support.exchange import exchange
from tests.support.fake_engine import NewEngine
from tests.support.fake_reporter import FakeReporter
from tests.support.fleet import until
from tests.support.router_process import RouterProcess

GOOD = "127.0.0.1"
# This is a loopback address too, so a connection made in error does no harm.
FORBIDDEN = "127.0.0.2"
# ZMQ connects within milliseconds of a registration. A router that is not allowed to connect never does.
QUIET_S = 2.0
WAIT_S = 20.0


def post(router: RouterProcess, path: str, body: object, method: str = "POST") -> tuple[int, Any]:
    answer = exchange(router.port, method, path, body)
    return answer.status, answer.json()


class Victim:
    """A listener at the forbidden address that nobody may reach."""

    def __init__(self) -> None:
        self._socket = socket.create_server((FORBIDDEN, 0))
        self.port = self._socket.getsockname()[1]

    def was_reached(self, within_s: float = QUIET_S) -> bool:
        return bool(select.select([self._socket], [], [], within_s)[0])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


def test_no_way_of_registering_leads_elsewhere(tmp_path: Path, new_engine: NewEngine, victim: Victim) -> None:
    engine = new_engine()
    forbidden = f"tcp://{FORBIDDEN}:{victim.port}"
    registration = engine.registration("w0", "m")
    with RouterProcess(tmp_path, ["--allow-host", GOOD]) as router:
        assert post(router, "/register", registration)[0] == 200
        router.wait_connected("w0")
        for fields in (
            {"endpoint": forbidden},
            {"replay_endpoint": forbidden},
            {"patch_endpoint": forbidden},
            {"url": f"http://{FORBIDDEN}:{victim.port}"},
            {"endpoint": "ipc:///tmp/kv.sock"},
            {"url": f"http://localhost:{victim.port}"},
        ):
            for worker_id in ("w0", "w1"):
                status, answer = post(router, "/register", registration | {"worker_id": worker_id} | fields)
                assert (status, answer["error"]["code"]) == (403, "host_not_allowed"), fields
                assert "allow_hosts" in answer["error"]["message"]
                assert next(iter(fields)) in answer["error"]["message"]
            assert post(router, "/workers/w0", fields, "PATCH")[0] == 403
        assert not victim.was_reached()
        rows = router.request("GET", "/workers")["workers"]
        assert [(row["worker_id"], row["state"] != "down") for row in rows] == [("w0", True)]

        # Another process writes a registration to Redis, and the next router that starts finds it.
        store = redis.Redis(unix_socket_path=str(next((tmp_path / "data").glob("*.sock"))))
        planted = {"worker": ["m", "planted", 0], "events": forbidden, "url": "http://127.0.0.1:1"}
        store.hset(keys.registry("m"), "planted@0", json.dumps(planted))
        store.close()
    with RouterProcess(tmp_path, ["--allow-host", GOOD]) as router:
        row = router.worker("planted")
        assert (row["state"], "allow_hosts" in row["reason"]) == ("down", True)
        assert router.worker("w0")["state"] != "down"
        assert not victim.was_reached()
        assert post(router, "/select", {"model": "m", "token_ids": [1] * 64})[1]["worker_id"] == "w0"
        assert router.log_tail().count("worker not followed") == 1
    with RouterProcess(tmp_path) as router:
        assert victim.was_reached(WAIT_S), "the test must see a router that is not restrained"
        router.worker("planted")


def test_a_patch_cannot_name_reports_elsewhere(tmp_path: Path, victim: Victim) -> None:
    async def main() -> bool:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        reporter = FakeReporter(context)
        reporter.reports_said = f"tcp://{FORBIDDEN}:{victim.port}"
        try:
            async with reporter:
                body = {"worker_id": "w0", "model": "m", "url": f"http://{GOOD}:1", "patch_endpoint": ""}
                body["patch_endpoint"] = reporter.requests_endpoint
                await asyncio.to_thread(router.request, "POST", "/register", body)
                # The first hello request finds the patch; with the second one, the router follows it.
                await asyncio.to_thread(until, lambda: len(reporter.requests) >= 2, "the patch is not followed")
                return await asyncio.to_thread(victim.was_reached)
        finally:
            context.destroy(linger=0)

    with RouterProcess(tmp_path, ["--allow-host", GOOD]) as router:
        assert not asyncio.run(main())
        router.unregister("w0")
    with RouterProcess(tmp_path) as router:
        assert asyncio.run(main()), "the test must see a router that is not restrained"


def test_an_engine_cannot_redirect_the_router(tmp_path: Path, victim: Victim) -> None:
    requested = threading.Event()

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("location", f"http://{FORBIDDEN}:{victim.port}/v1/models")
            self.end_headers()
            requested.set()

        def log_message(self, *_: object) -> None:
            pass

    engine = HTTPServer((GOOD, 0), Redirecting)
    serving = threading.Thread(target=engine.serve_forever)
    serving.start()
    try:
        worker = f"w0=http://{GOOD}:{engine.server_port}"
        with RouterProcess(tmp_path, ["--allow-host", GOOD, "--worker", worker]) as router:
            assert requested.wait(WAIT_S)
            assert not victim.was_reached()
            assert "its model is not known" in router.log_tail()
    finally:
        engine.shutdown()
        serving.join()
        engine.server_close()
