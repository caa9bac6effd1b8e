# SPDX-License-Identifier: Apache-2.0
"""Engines that fail and hang: retries, blame, and the client's answer. The sockets are real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import uvloop

from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.serve.proxy.circuit_breaker import FAILURES_TO_OPEN
from tests.contract.proxy_support import BODY, CHAT, OK, RAW, WAIT_S, code, fleet, proxying, received, until, worker
from tests.contract.served_app import request as raw_request
from tests.support.scripted_engine import (
    STREAM_HEAD,
    Asked,
    Script,
    ScriptedEngine,
    Wire,
    chunk,
    hang,
    plain,
    reset,
    stream,
)

RESPONSES = "/v1/responses"
W0 = WorkerKey("m", "w0")
UNAVAILABLE = plain(b'{"error": "The model is currently scaling."}', "503 Service Unavailable")
FAILING = plain(b"", "500 Oh")


async def head_then_reset(asked: Asked, wire: Wire) -> None:
    """Send a head and reset, as vLLM's stream may before its first token."""
    await wire.send(STREAM_HEAD)
    wire.reset()


async def close_at_once(asked: Asked, wire: Wire) -> None:
    wire.close()


@pytest.mark.parametrize(
    ("script", "kind"),
    [(reset, "reset"), (close_at_once, "reset"), (head_then_reset, "reset"), (UNAVAILABLE, "gone")],
)
def test_a_request_that_failed_before_its_first_byte_goes_to_another_worker(script: Script, kind: str) -> None:
    with fleet(script, stream([b"a", b"b"])) as (router, bad, good):
        status, headers, answer = router.post(CHAT, BODY)
        assert (status, answer) == (200, b"ab")
        assert (headers["x-kvrouter-worker"], headers["x-kvrouter-retried"]) == ("w1", f"w0 {kind}")
        assert bad.asked[0].body == good.asked[0].body == RAW
        assert bad.asked[0].all("x-request-id") == good.asked[0].all("x-request-id")
        assert router.sample("proxy_retries_total", kind=kind) == 1
        assert router.sample("proxy_failures_total", worker="w0", kind=kind) == 1


def test_two_refused_connections_are_an_error() -> None:
    with fleet(OK, OK, OK) as (router, first, second, _):
        first.kill()
        second.kill()
        for path in (CHAT, RESPONSES):
            status, headers, answer = router.post(path, BODY)
            assert (status, answer, headers["x-kvrouter-retried"]) == (200, b"ok", "w0 refused, w1 refused")


def test_a_request_that_kills_engines_is_sent_to_two_at_most() -> None:
    with fleet(reset, reset, OK) as (router, _, _, third):
        assert router.failure(CHAT, BODY) == (502, "worker_unreachable", "w0 reset, w1 reset")
        assert not third.asked
        assert router.sample("proxy_requests_total", path=CHAT, outcome="unreachable") == 1


def test_a_request_that_may_have_changed_state_is_not_sent_twice() -> None:
    with fleet(reset, OK) as (router, _, other):
        assert router.failure(RESPONSES, BODY) == (502, "worker_unreachable", "w0 reset")
        assert not other.asked


def test_a_retry_may_use_another_rank_with_its_own_url() -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(ScriptedEngine(script)) for script in (reset, OK))
        router = stack.enter_context(proxying(worker("w0", first.url), worker("w0", second.url, rank=1)))
        status, headers, _ = router.post(CHAT, BODY)
        assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-retried"]) == (200, "w0@1", "w0 reset")
    with ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(reset))
        router = stack.enter_context(proxying(worker("w0", engine.url), worker("w0", engine.url, rank=1)))
        # Both ranks are one process, so a request that killed it once is not sent to it again.
        assert router.post(CHAT, BODY)[0] == 502 and len(engine.asked) == 1


def test_a_pinned_request_goes_nowhere_else() -> None:
    with fleet(reset, OK) as (router, _, other):
        assert router.failure(CHAT, BODY, {"x-kvrouter-worker": "w0"})[:2] == (502, "worker_unreachable")
        assert not other.asked


def test_the_last_gateway_error_is_passed_on_if_no_worker_answers() -> None:
    with fleet(UNAVAILABLE, OK) as (router, _, other):
        other.kill()
        assert router.failure(CHAT, BODY) == (502, "worker_unreachable", "w0 gone, w1 refused")
        router.core.registered.popitem()
        status, headers, answer = router.post(CHAT, BODY)
        assert (status, b"scaling" in answer, headers["x-kvrouter-retried"]) == (503, True, "w0 gone")


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "429 Too Many Requests"])
def test_no_worker_is_blamed_for_a_clients_error(status: str) -> None:
    with fleet(plain(b"no", status), OK) as (router, _, other):
        for _ in range(3 * FAILURES_TO_OPEN):
            assert router.post(CHAT, BODY)[0] == int(status[:3])
        assert not other.asked
        assert router.admission.problem(W0) is None
        # An answer is counted just after it was sent.
        until(
            lambda: router.sample("proxy_answers_total", worker="w0", outcome="client_error") == 3 * FAILURES_TO_OPEN,
            "each answer counts",
        )


def test_errors_of_an_engine_open_its_breaker_and_an_answer_closes_it() -> None:
    with fleet(FAILING, OK) as (router, bad, _):
        for _ in range(FAILURES_TO_OPEN):
            # A 500 may be the request's fault, so it is passed on.
            assert router.post(CHAT, BODY)[0] == 500
        assert router.post(CHAT, BODY)[2] == b"ok"
        row = next(row for row in router.get("/workers")["workers"] if row["worker_id"] == "w0")
        assert "5 failures in a row, the last: it answers 500" in row["closed"]
        (reason,) = router.get("/health")["reasons"]
        assert "w0 takes no requests" in reason
        assert router.sample("proxy_breaker_state", worker="w0", state="open") == 1
        assert len(bad.asked) == FAILURES_TO_OPEN
        status, _, answer = router.post(CHAT, BODY, {"x-kvrouter-worker": "w0"})
        assert (status, code(answer)) == (503, "no_worker") and b"failures in a row" in answer
        bad.script = plain(b"back")
        until(lambda: router.post(CHAT, BODY)[2] == b"back", "it is tried again")
        assert router.sample("proxy_breaker_state", worker="w0", state="open") == 0
        assert router.sample("proxy_breaker_state", worker="w0", state="closed") == 1


def test_a_draining_worker_finishes_what_it_has_and_gets_no_more() -> None:
    go_on: list[bool] = []

    async def slow(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(b"begun"))
        while not go_on and not wire.gone.is_set():
            await wire.send()
        await wire.send(chunk(b" done"), b"0\r\n\r\n")

    with fleet(slow, OK) as (router, _, _), router.connect() as client:
        client.sendall(raw_request(CHAT, RAW))
        begun = b""
        while b"begun" not in begun:
            begun += client.recv(65_536)
        router.core.draining.add(W0)
        assert router.post(CHAT, BODY)[2] == b"ok"
        status, _, answer = router.post(CHAT, BODY, {"x-kvrouter-worker": "w0"})
        assert status == 503 and b"it is draining" in answer
        go_on.append(True)
        assert received(client).endswith(b" done\r\n0\r\n\r\n")


def view(state: StreamState, reason: str) -> WorkerView:
    return WorkerView(W0, None, state, False, reason, "", None, None, {})  # type: ignore[arg-type]


def test_a_request_that_waits_at_an_engine_that_is_lost_goes_to_another() -> None:
    with fleet(hang, OK) as (router, hung, _), router.connect() as client:
        client.sendall(raw_request(CHAT, RAW))
        until(lambda: len(hung.asked) == 1, "it waits there")
        router.on_loop(lambda: router.admission.on_view(W0, view(StreamState.DOWN, "no answer 3 times")))
        answer = received(client)
        assert b"x-kvrouter-retried: w0 lost\r\n" in answer and answer.endswith(b"\r\n\r\nok")
        until(lambda: hung.given_up == 1, "the hung engine's request is over")
        assert "health check: no answer 3 times" in str(router.admission.problem(W0))
        router.on_loop(lambda: router.admission.on_view(W0, view(StreamState.LIVE, "")))
        assert router.admission.problem(W0) is None


def test_connections_are_kept_and_a_closed_one_costs_no_request() -> None:
    closed: list[Asked] = []

    async def then_close(asked: Asked, wire: Wire) -> None:
        # By its head, the answer keeps the connection alive, but the engine closes it anyway.
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await wire.closed()
        closed.append(asked)

    with fleet(OK) as (router, engine):
        for _ in range(5):
            assert router.post(CHAT, BODY)[2] == b"ok"
        assert {asked.connection for asked in engine.asked} == {1}
        # A request that must not arrive twice gets a new connection.
        assert router.post(RESPONSES, BODY)[2] == b"ok"
        assert engine.asked[-1].connection == 2
        engine.script = then_close
        for n in range(20):
            status, headers, answer = router.post(CHAT, BODY)
            assert (status, answer, headers.get("x-kvrouter-retried")) == (200, b"ok", None)
            until(lambda n=n: len(closed) == n + 1, "it is closed")  # type: ignore[misc]
        assert router.admission.problem(W0) is None


@pytest.mark.parametrize("end", [Wire.reset, Wire.close])
def test_a_request_on_a_kept_connection_may_have_been_started(end: Callable[[Wire], None]) -> None:
    async def die(asked: Asked, wire: Wire) -> None:
        if b"poison" in asked.body:
            end(wire)
        else:
            await OK(asked, wire)

    poison = {"model": "m", "messages": [{"role": "user", "content": "poison"}]}
    with fleet(*[die] * 5) as (router, *engines):
        for n in range(5):
            assert router.post(CHAT, BODY, {"x-kvrouter-worker": f"w{n}"})[0] == 200
        assert router.failure(CHAT, poison) == (502, "worker_unreachable", "w0 reset, w1 reset")
        assert [len(engine.asked) for engine in engines] == [2, 2, 1, 1, 1]
        assert router.sample("proxy_failures_total", worker="w0", kind="reset") == 1
        status, headers, _ = router.post(CHAT, poison, {"x-kvrouter-worker": "w2"})
        assert (status, headers["x-kvrouter-retried"], len(engines[2].asked)) == (502, "w2 reset", 2)
        # The failure counts for the worker's breaker, as on a new connection.
        for _ in range(FAILURES_TO_OPEN - 1):
            router.post(CHAT, poison, {"x-kvrouter-worker": "w2"})
        assert "5 failures in a row" in str(router.admission.problem(WorkerKey("m", "w2")))


def test_a_kept_connection_whose_end_was_on_its_way_when_the_request_went_is_stale() -> None:
    """Send a request while the end of the connection is on its way.

    The engine cannot have begun on a request that the kernel of its side never took.
    """
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def exchange(listener: socket.socket, *, read: bool) -> Failure:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(loop), *listener.getsockname())
        engine, _ = listener.accept()
        answered = connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"", WAIT_S)
        assert engine.recv(1_000)
        engine.sendall(answer)
        await answered
        assert connection.reusable() and connection.is_open
        if not read:
            engine.close()
            assert not connection.is_open
        # The request is sent as if `is_open` had been read a moment before.
        answered = connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"body", WAIT_S)
        if read:
            assert engine.recv(1_000)
            engine.close()
        with pytest.raises(Failure) as raised:
            await answered
        connection.close()
        return raised.value

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        assert runner.run(directly(exchange(listener, read=False))).kind is Kind.STALE
        assert runner.run(directly(exchange(listener, read=True))).kind is Kind.RESET
