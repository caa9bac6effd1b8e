# SPDX-License-Identifier: Apache-2.0
"""Clients that hang up, read slowly, pipeline, send in pieces or speak HTTP/1.0.

Each gets its answer, and its resources are freed.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.proxy.circuit_breaker import FAILURES_TO_OPEN
from tests.contract.proxy_support import CHAT, OK, RAW, fleet, received, until
from tests.contract.served_app import request as raw_request
from tests.support.scripted_engine import STREAM_HEAD, Asked, Script, Wire, chunk, hang, plain, stream

W0 = WorkerKey("m", "w0")
# Long enough for a loop that is not held back to send some more megabytes.
PAUSE_S = 0.3


async def endless(asked: Asked, wire: Wire) -> None:
    await wire.send(STREAM_HEAD)
    while not wire.gone.is_set():
        await wire.send(chunk(b"data: x\n\n"))


def test_clients_that_hang_up_end_their_requests_and_no_worker_is_blamed() -> None:
    with fleet(hang) as (router, engine):
        for n in range(1, 2 * FAILURES_TO_OPEN):
            with router.connect() as client:
                client.sendall(raw_request(CHAT, RAW))
                until(lambda n=n: len(engine.asked) == n, "the engine has the request")  # type: ignore[misc]
            until(lambda n=n: engine.given_up == n, "the engine's request ended with the client's")  # type: ignore[misc]
        assert router.admission.problem(W0) is None
        until(lambda: router.sample("proxy_requests_total", path=CHAT, outcome="client_gone") == n, "counted")
        assert router.sample("proxy_open_requests") == 0


def test_a_client_that_hangs_up_while_a_changed_key_is_read_ends_the_refused_request() -> None:
    async def refuse(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD.replace(b"200 OK", b"401 Unauthorized"), chunk(b"refused"))
        await wire.gone.wait()

    reads = threading.Event()

    async def read() -> None:
        reads.set()
        await asyncio.Event().wait()

    with fleet(refuse, worker_api_key="old", allow_hosts=("127.0.0.1",)) as (router, engine):
        router.engine_key.reader = read
        with router.connect() as client:
            client.sendall(raw_request(CHAT, RAW))
            until(reads.is_set, "the key is read")
        until(lambda: engine.given_up == 1, "the engine's request ended with the client's")
        until(lambda: router.sample("proxy_open_requests") == 0, "the request is over")
        assert router.admission.problem(W0) is None


def test_a_client_that_hangs_up_within_a_stream_ends_it_at_the_engine() -> None:
    with fleet(endless) as (router, engine):
        with router.connect() as client:
            client.sendall(raw_request(CHAT, RAW))
            assert b"200" in client.recv(100)
        until(lambda: engine.given_up == 1, "the engine's request ended")
        until(lambda: router.sample("proxy_open_requests") == 0, "the request is over")
        assert router.admission.problem(W0) is None


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_the_engine_back() -> None:
    sent = [0]
    piece = b"x" * 65_536

    async def flood(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD)
        for _ in range(2_000):
            await wire.send(chunk(piece))
            sent[0] += len(piece)
        await wire.send(b"0\r\n\r\n")

    with fleet(flood) as (router, engine), router.connect() as client:
        client.sendall(raw_request(CHAT, RAW))
        client.recv(1_000)
        before = -1
        while before != sent[0]:
            before = sent[0]
            time.sleep(PAUSE_S)
        # The engine sent the bytes that the kernel buffers on both sides and some hundred kB that the router buffers,
        # not the 131 MB.
        assert sent[0] < 40 * 1024**2
        assert len(received(client)) > (2_000 - 1) * len(piece)
        assert not engine.given_up


@pytest.mark.slow
def test_a_slow_reader_is_kept_and_a_client_that_does_not_read_is_cut() -> None:
    body = b"y" * (24 * 1024**2)
    limits = HttpLimits(send_timeout_s=7 * PAUSE_S)
    with fleet(plain(body), limits=limits) as (router, _):
        with router.connect() as client:
            client.sendall(raw_request(CHAT, RAW))
            total = 0
            # Reading takes nearly three times the limit in all, but no pause is near the limit.
            for _ in range(20):
                for _ in range(8):
                    total += len(client.recv(128 * 1024))
                time.sleep(PAUSE_S)
            assert total + len(received(client)) > len(body)
        with router.connect() as client:
            client.sendall(raw_request(CHAT, RAW))
            reason = {"reason": "send_time"}
            until(lambda: router.sample("http_connections_cut_total", **reason) == 1, "it is cut")
        # The kernel may have taken all of the engine's answer by then, so the engine need not notice.
        until(lambda: router.sample("proxy_open_requests") == 0, "the request is over")


def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def script(asked: Asked, wire: Wire) -> None:
        await stream([asked.body[-2:]])(asked, wire)

    bodies = [b'{"model": "m", "n":%d}' % n for n in range(5)]
    with fleet(script) as (router, _):
        requests = [raw_request(CHAT, body, close=False) for body in bodies[:-1]]
        version = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
        answers = router.exchange(b"".join(requests) + version + raw_request(CHAT, bodies[-1]))
        places = [answers.index(b"2\r\n%d}\r\n" % n) for n in range(5)]
        assert places == sorted(places)
        assert places[3] < answers.index(b'"version"') < places[4]
        assert answers.count(b"HTTP/1.1 200 OK") == 6


def test_a_body_that_waits_behind_a_slow_answer_is_not_late() -> None:
    limits = HttpLimits(body_timeout_s=0.5)

    async def slow(asked: Asked, wire: Wire) -> None:
        await asyncio.sleep(3 * limits.body_timeout_s)
        await OK(asked, wire)

    with fleet(slow, limits=limits) as (router, _), router.connect() as client:
        client.sendall(raw_request(CHAT, RAW, close=False))
        head, body = raw_request(CHAT, RAW).split(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n" + body[:5])
        time.sleep(limits.body_timeout_s)
        client.sendall(body[5:])
        assert received(client).count(b"HTTP/1.1 200 OK") == 2


def test_hanging_up_with_a_pipelined_request_ends_the_running_one() -> None:
    with fleet(endless) as (router, engine):
        with router.connect() as client:
            client.sendall(raw_request(CHAT, RAW, close=False))
            until(lambda: len(engine.asked) == 1, "the first runs")
            client.sendall(raw_request(CHAT, RAW, close=False))
            client.recv(100)
        until(lambda: engine.given_up == 1, "it ended at the engine")
        assert len(engine.asked) == 1
        until(lambda: router.sample("proxy_open_requests") == 0, "nothing is left")


def test_a_client_that_expects_100_continue_gets_it() -> None:
    with fleet(OK) as (router, engine), router.connect() as client:
        head, body = raw_request(CHAT, RAW, "expect: 100-continue").split(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(65_536).endswith(b"ok")
        assert not engine.asked[0].all("expect")


@pytest.mark.parametrize("script", [OK, stream([b"o", b"k"])])
def test_a_client_of_http_1_0_gets_no_chunks(script: Script) -> None:
    with fleet(script) as (router, _):
        answer = router.exchange(raw_request(CHAT, RAW).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert answer.endswith(b"\r\n\r\nok") and b"chunked" not in answer


def test_a_body_in_many_pieces_arrives_whole() -> None:
    with fleet(OK) as (router, engine), router.connect() as client:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        client.sendall(head.encode())
        for byte in RAW:
            client.sendall(chunk(bytes([byte])))
        client.sendall(b"0\r\n\r\n")
        assert client.recv(65_536).endswith(b"ok")
        assert engine.asked[0].body == RAW
        assert engine.asked[0].all("content-length") == [str(len(RAW))]


def test_an_upgrade_to_another_protocol_is_refused() -> None:
    with fleet(OK) as (router, engine):
        answer = router.exchange(raw_request(CHAT, RAW, "connection: upgrade", "upgrade: h2c", close=False))
        assert answer.startswith(b"HTTP/1.1 400 ") and b"upgrade_not_supported" in answer
        assert not engine.asked
