# SPDX-License-Identifier: Apache-2.0
"""Engines whose answers are slow, cut, malformed or too long: the client's answer, and the connections that are kept.

The sockets are real.
"""

from __future__ import annotations

import asyncio
import http.client
import json

import pytest

from kvrouter.router.model.upstream.connection import MAX_INTERIM_ANSWERS
from kvrouter.router.serve.proxy.circuit_breaker import FAILURES_TO_OPEN, PAUSE_FIRST_S
from tests.contract.proxy_support import BODY, CHAT, OK, RAW, code, fleet, until
from tests.contract.served_app import request as raw_request
from tests.support.scripted_engine import STREAM_HEAD, Asked, Wire, chunk, hang, plain, stream

# An answer whose beginning must arrive in time, which it does even if the machine stalls for a second.
PATIENT_S = 1.5


def test_a_silent_engine_is_given_up_after_the_timeout() -> None:
    with fleet(hang, OK, answer_timeout_s=0.3) as (router, _, other):
        assert router.failure(CHAT, BODY)[:2] == (504, "worker_timeout")
        assert not other.asked
        assert router.sample("proxy_failures_total", worker="w0", kind="silent") == 1


@pytest.mark.parametrize("piece", [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n"])
def test_interim_answers_do_not_count_as_progress_and_are_bounded(piece: bytes) -> None:
    async def now_and_then(asked: Asked, wire: Wire) -> None:
        while not wire.gone.is_set():
            await wire.send(piece)
            # Four interim answers fit within the timeout.
            await asyncio.sleep(0.1)

    async def at_once(asked: Asked, wire: Wire) -> None:
        await wire.send(piece * MAX_INTERIM_ANSWERS)
        await OK(asked, wire)

    async def too_many(asked: Asked, wire: Wire) -> None:
        await wire.send(piece * (MAX_INTERIM_ANSWERS + 1))
        await OK(asked, wire)

    with fleet(now_and_then, OK, answer_timeout_s=0.45) as (router, _, other):
        status, headers, answer = router.post(CHAT, BODY)
        assert (status, code(answer), headers["x-kvrouter-retried"]) == (504, "worker_timeout", "w0 silent")
        assert not other.asked
    with fleet(at_once) as (router, _):
        answer = router.exchange(raw_request(CHAT, RAW))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b"x: y" not in answer and answer.endswith(b"ok")
    with fleet(too_many) as (router, _):
        status, headers, answer = router.post(CHAT, BODY)
        assert (status, headers["x-kvrouter-retried"]) == (502, "w0 malformed") and b"interim" in answer


def test_interim_answers_are_bounded_in_bytes() -> None:
    async def large(asked: Asked, wire: Wire) -> None:
        for _ in range(MAX_INTERIM_ANSWERS):
            await wire.send(b"HTTP/1.1 103 Early Hints\r\nlink: " + b"y" * 20_000 + b"\r\n\r\n")
        await OK(asked, wire)

    with fleet(large) as (router, _):
        assert router.post(CHAT, BODY)[1]["x-kvrouter-retried"] == "w0 malformed"


@pytest.mark.parametrize("drip", [b"x", b"x: y\r\n"])
def test_endless_heads_and_trailers_do_not_count_as_progress(drip: bytes) -> None:
    async def in_the_head(asked: Asked, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\n")
        await drips(wire)

    async def in_the_trailers(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(b"begun"), b"0\r\n")
        await drips(wire)

    async def drips(wire: Wire) -> None:
        while not wire.gone.is_set():
            await wire.send(drip)
            await asyncio.sleep(0.1)

    with fleet(in_the_head, answer_timeout_s=0.45) as (router, _):
        assert router.post(CHAT, BODY)[0] == 504
    with fleet(in_the_trailers, answer_timeout_s=PATIENT_S) as (router, engine):
        assert router.exchange(raw_request(CHAT, RAW)).endswith(chunk(b"begun"))
        until(lambda: engine.given_up == 1, "the engine's request is over")


def test_trailers_of_an_answer_are_not_headers() -> None:
    async def at_once(asked: Asked, wire: Wire) -> None:
        trailers = b"0\r\nset-cookie: a=b\r\nx-request-id: other\r\nx-own: 1\r\n\r\n"
        await wire.send(STREAM_HEAD + chunk(b"whole") + trailers)

    with fleet(at_once) as (router, engine):
        for _ in range(2):
            head, _, body = router.exchange(raw_request(CHAT, RAW)).partition(b"\r\n\r\n")
            assert body == chunk(b"whole") + b"0\r\n\r\n"
            for name in (b"set-cookie", b"other", b"x-own"):
                assert name not in head
        # The connection is kept, so the trailers ended where they should.
        assert {asked.connection for asked in engine.asked} == {1}


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked",
        "HTTP/2.0 200 OK\r\ncontent-length: 2",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade",
    ],
)
def test_an_answer_with_two_lengths_or_another_coding_is_malformed(head: str) -> None:
    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(head.encode() + b"\r\n\r\nok")
        wire.close()

    with fleet(script) as (router, _):
        status, headers, _ = router.post(CHAT, BODY)
        assert (status, headers["x-kvrouter-retried"]) == (502, "w0 malformed")


def test_an_answer_without_a_body_announces_none() -> None:
    with fleet(plain(b"", "204 No Content")) as (router, engine):
        for _ in range(2):
            head, _, body = router.exchange(raw_request(CHAT, RAW)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 204 No Content\r\n") and not body
            assert b"content-length" not in head and b"transfer-encoding" not in head
        assert {asked.connection for asked in engine.asked} == {1}


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegun", STREAM_HEAD + chunk(b"begun")]
)
def test_an_answer_that_breaks_off_breaks_off_for_the_client(head: bytes) -> None:
    got: list[bytes] = []

    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(head)
        while not got and not wire.gone.is_set():
            await wire.send()
        wire.reset()

    with fleet(script) as (router, _):
        connection = router.http_client()
        connection.request("POST", CHAT, RAW)
        answer = connection.getresponse()
        got.append(answer.read(5))
        assert got == [b"begun"]
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        connection.close()
        until(lambda: router.sample("proxy_requests_total", path=CHAT, outcome="cut") == 1, "counted")
        assert router.sample("proxy_failures_total", worker="w0", kind="cut") == 1


CUT_STREAM = STREAM_HEAD + chunk(b"begun")
CUT_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegun"


@pytest.mark.parametrize("begun", [CUT_LENGTH, CUT_STREAM])
def test_an_engine_that_breaks_every_answer_off_is_left_alone(begun: bytes) -> None:
    heals = False
    now_s = 0.0

    async def breaks(asked: Asked, wire: Wire) -> None:
        if heals:
            await OK(asked, wire)
        else:
            await wire.send(begun)
            wire.close()

    with fleet(breaks, OK) as (router, broken, _):
        router.admission.clock = lambda: now_s

        def whole_answers(requests: int) -> int:
            return sum(router.exchange(raw_request(CHAT, RAW)).endswith(b"\r\n\r\nok") for _ in range(requests))

        assert whole_answers(60) == 60 - FAILURES_TO_OPEN
        (row,) = (row for row in router.get("/workers")["workers"] if row["worker_id"] == "w0")
        assert "5 useless answers in a row, the last: the engine closed the connection" in row["closed"]
        assert router.sample("proxy_breaker_state", worker="w0", state="open") == 1
        now_s += PAUSE_FIRST_S
        assert whole_answers(10) == 9, "the one that tries is judged at its end"
        heals, now_s = True, now_s + 2 * PAUSE_FIRST_S
        assert whole_answers(10) == 10
        assert len(broken.asked) == FAILURES_TO_OPEN + 1 + 10
        assert router.sample("proxy_breaker_state", worker="w0", state="closed") == 1


@pytest.mark.parametrize(("code", "counts"), [(500, True), (400, False)])
def test_a_stream_that_ends_with_the_engines_error_is_a_broken_answer(code: int, counts: bool) -> None:
    error = {"error": {"message": 'it says "code": 500', "type": "x", "param": None, "code": code}}
    events = [b'data: {"choices": []}\n\n', b"data: " + json.dumps(error).encode() + b"\n\n", b"data: [DONE]\n\n"]
    with fleet(stream(events), OK) as (router, failing, other):
        router.admission.clock = lambda: 0.0
        for _ in range(FAILURES_TO_OPEN):
            # The client gets the engine's error unchanged.
            assert router.post(CHAT, BODY)[2] == b"".join(events)
        router.post(CHAT, BODY)
        assert (len(failing.asked), len(other.asked)) == ((5, 1) if counts else (6, 0))
        failed = router.sample("proxy_requests_total", path=CHAT, outcome="server_error")
        assert failed == (FAILURES_TO_OPEN if counts else 0)


def test_a_client_that_hangs_up_on_the_one_that_tries_leaves_it_to_the_next() -> None:
    refuses = True
    now_s = 0.0

    async def serves(asked: Asked, wire: Wire) -> None:
        if refuses:
            await plain(b"no", "500 Internal Server Error")(asked, wire)
        elif b"endless" in asked.body:
            await wire.send(STREAM_HEAD, chunk(b"begun"))
            await wire.gone.wait()
        else:
            await OK(asked, wire)

    with fleet(serves) as (router, engine):
        router.admission.clock = lambda: now_s
        for _ in range(FAILURES_TO_OPEN):
            assert router.post(CHAT, BODY)[0] == 500
        refuses, now_s = False, PAUSE_FIRST_S
        with router.connect() as client:
            client.sendall(raw_request(CHAT, b'{"model": "m", "user": "endless"}'))
            while b"begun" not in client.recv(1024**2):
                pass
            assert router.post(CHAT, BODY)[0] == 503, "one request tries, to its end"
        until(lambda: engine.given_up == 1, "the engine's request is over")
        until(lambda: router.post(CHAT, BODY)[0] == 200, "the next one tries")


def test_an_engine_that_falls_silent_within_a_stream_is_given_up() -> None:
    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(b"begun"))
        await wire.gone.wait()

    with fleet(script, answer_timeout_s=PATIENT_S) as (router, engine):
        assert router.exchange(raw_request(CHAT, RAW)).endswith(chunk(b"begun"))
        until(lambda: engine.given_up == 1, "the engine's request is over")


def test_an_answer_that_is_not_http_is_502() -> None:
    async def nonsense(asked: Asked, wire: Wire) -> None:
        await wire.send(b"SSH-2.0-OpenSSH_9.6\r\n")

    async def long_head(asked: Asked, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000)
        await wire.gone.wait()

    for script in (nonsense, long_head):
        with fleet(script) as (router, _):
            assert router.failure(CHAT, BODY) == (502, "worker_unreachable", "w0 malformed")


def test_unrequested_bytes_never_answer_another_request() -> None:
    async def twice(asked: Asked, wire: Wire) -> None:
        template = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"
        await wire.send(template % (5, b"right") + template % (5, b"wrong"))

    async def later(asked: Asked, wire: Wire) -> None:
        await plain(b"right")(asked, wire)
        await asyncio.sleep(0.05)
        await plain(b"wrong")(asked, wire)
        sent.append(asked)

    with fleet(twice) as (router, engine):
        # The requests share one connection of the client, on which surplus bytes would become the next answer.
        requests = [raw_request(CHAT, RAW, close=False)] * 3 + [raw_request(CHAT, RAW)]
        answers = router.exchange(b"".join(requests))
        assert answers.count(b"\r\n\r\nright") == 4 and b"wrong" not in answers
        assert {asked.connection for asked in engine.asked} == {1, 2, 3, 4}
    sent: list[Asked] = []
    with fleet(later) as (router, engine):
        for n in range(3):
            assert router.post(CHAT, BODY)[2] == b"right"
            until(lambda n=n: len(sent) == n + 1, "it came while the connection was idle")  # type: ignore[misc]
        assert len({asked.connection for asked in engine.asked}) == 3


@pytest.mark.parametrize("byte", [*range(9), *range(11, 13), *range(14, 32), 127])
def test_no_control_character_of_a_reason_phrase_reaches_the_client(byte: int) -> None:
    async def phrased(asked: Asked, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 201 a%bb\r\ncontent-length: 2\r\n\r\nok" % bytes((byte,)))

    with fleet(phrased, phrased) as (router, *_):
        answer = router.exchange(raw_request(CHAT, RAW))
        assert answer.startswith(b"HTTP/1.1 201 Created\r\n") and answer.endswith(b"ok")
