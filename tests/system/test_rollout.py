# SPDX-License-Identifier: Apache-2.0
"""A router that stops loses nothing.

Clients that connect are served or refused, streams end whole, and `/ready` says no at once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.chart import CHART
from tests.support.exchange import exchange
from tests.support.fleet import until
from tests.support.hammer import Hammer
from tests.support.replica_process import ReplicaProcess
from tests.support.rollout import rollout
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, Wire, chunk, plain

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAMED = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
# Two requests over new connections: one that is proxied, and one that the router answers itself.
PROXIED = (
    f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
    + BODY
)
OWN = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
STREAMS = 4
PIECES = 30
PIECE_S = 0.05
WAIT_S = 30.0
PROCESSES = {1: [], 2: ["--processes", "2"]}


async def engine_script(asked: Asked, wire: Wire) -> None:
    if b'"stream"' not in asked.body:
        await plain(b"ok")(asked, wire)
        return
    await wire.send(STREAM_HEAD)
    for n in range(PIECES):
        await wire.send(chunk(b"data: %d\n\n" % n))
        await asyncio.sleep(PIECE_S)
    await wire.send(b"0\r\n\r\n")


@contextmanager
def serving(folder: Path, processes: int, *flags: str) -> Iterator[tuple[RouterProcess, ScriptedEngine]]:
    with ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(engine_script))
        arguments = ["--health-interval-s", "0", "--worker", f"w0={engine.url},model=m", *PROCESSES[processes], *flags]
        router = stack.enter_context(RouterProcess(folder, arguments))
        until(lambda: "listens on" in router.log_tail(), "it does not listen")
        yield router, engine


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_who_connects_while_it_stops_is_served_or_refused(tmp_path: Path, processes: int, delay_s: float) -> None:
    flags = ["--shutdown-delay-s", str(delay_s)] if delay_s else []
    with serving(tmp_path, processes, *flags) as (router, engine), ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(exchange, router.port, "POST", CHAT, STREAMED) for _ in range(STREAMS)]
        hammers = [Hammer(router.port, request) for request in (PROXIED, OWN)]
        try:
            while sum(b'"stream"' in request.body for request in list(engine.asked)) < STREAMS:
                time.sleep(0.01)
            router.signal(signal.SIGTERM)
            ended = sum((Counter(hammer.ended()) for hammer in hammers), Counter())
        finally:
            for hammer in hammers:
                hammer.kill()
        assert not {how: count for how, count in ended.items() if how.startswith("broken")}, ended
        assert ended["served"] > 10 and ended["refused"]
        whole = b"".join(b"data: %d\n\n" % n for n in range(PIECES))
        assert [future.result().content for future in streams] == [whole] * STREAMS
        assert router.wait() == 0
        assert "Traceback" not in router.log_tail()


@pytest.mark.parametrize("processes", PROCESSES)
def test_it_is_not_ready_from_the_signal_on_and_serves_on_for_the_delay(tmp_path: Path, processes: int) -> None:
    with serving(tmp_path, processes, "--shutdown-delay-s", "3600") as (router, _):
        assert exchange(router.port, "GET", "/ready").status == 200
        router.signal(signal.SIGTERM)
        # Every process notices the signal for itself.
        until(lambda: all(exchange(router.port, "GET", "/ready").status == 503 for _ in range(20)), "it stays ready")
        answer = exchange(router.port, "GET", "/ready")
        assert answer.status == 503 and "this router is shutting down" in answer.json()["error"]["message"]
        assert exchange(router.port, "GET", "/health").status == 200
        assert exchange(router.port, "POST", CHAT, STREAMED).content.count(b"data: ") == PIECES
        # A kept connection ends with its answer, so that its client comes to another router.
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
        for method, path, body in (("POST", CHAT, BODY), ("GET", "/version", None), ("POST", "/query", b"{}")):
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
            assert response.getheader("connection") == "close", path
        connection.close()
        # The second signal ends the delay.
        router.signal(signal.SIGINT)
        assert router.wait() == 0


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_client_whose_stream_outlives_the_listener_may_send_one_more_request(tmp_path: Path, processes: int) -> None:
    """Send one more request over a connection whose stream began before the router's end.

    The head of the stream's answer promised that the connection stays.
    """
    with serving(tmp_path, processes) as (router, _):
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
        connection.request("POST", CHAT, STREAMED)
        response = connection.getresponse()
        assert response.getheader("connection") is None
        router.signal(signal.SIGTERM)
        assert response.read().count(b"data: ") == PIECES
        with pytest.raises(ConnectionRefusedError):
            exchange(router.port, "GET", "/ready")
        connection.request("POST", CHAT, BODY)
        response = connection.getresponse()
        assert (response.read(), response.getheader("connection")) == (b"ok", "close")
        connection.close()
        assert router.wait() == 0


def test_two_routers_are_replaced_one_after_the_other_and_no_stream_breaks(tmp_path: Path) -> None:
    """Run the chart's rollout with shorter times.

    `python -m tests.support.rollout` runs it with the chart's own times (`--streams 200` for 200 streams).
    """
    values = {"router": {"shutdownDelaySeconds": 3, "drainSeconds": 30}}
    stream_ends, opened, took = rollout(tmp_path, 24, values)
    assert set(stream_ends) == {"whole"} and stream_ends["whole"] > 48, stream_ends
    assert opened > 12
    assert all(3 <= end < 45 for end in took)


def test_an_engines_pre_stop_returns_when_no_request_is_left(tmp_path: Path) -> None:
    hook = CHART / "files" / "wait-until-idle.py"
    with ReplicaProcess(tmp_path, ["--model", "sim", "--step-ms", "100"]) as replica, ThreadPoolExecutor(1) as thread:
        host, _, port = replica.endpoints["url"].removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        # The request ends some seconds after the hook would end without it.
        body = {"model": "sim", "prompt": [1, 2, 3], "max_tokens": 90, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.readline()
        command = [sys.executable, "-c", hook.read_text(), replica.endpoints["url"]]
        with subprocess.Popen(command) as waiting:
            answer = thread.submit(response.read)
            while waiting.poll() is None:
                time.sleep(0.1)
            assert answer.done() and answer.result().endswith(b"data: [DONE]\n\n")
        assert waiting.returncode == 0
        connection.close()
    # For an engine that is gone, the hook does not wait; Kubernetes takes a failed hook for a finished one.
    gone = subprocess.run(command, capture_output=True, text=True)
    assert gone.returncode != 0 and "Connection refused" in gone.stderr
