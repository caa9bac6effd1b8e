# SPDX-License-Identifier: Apache-2.0
"""Everything that a client can occupy of the HTTP server is bounded, and others are served meanwhile.

The tests use raw sockets and a real uvicorn.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrouter.router.serve.access.certificate import CertificateFiles, read_certificate
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.api.http.http_connection import LAST_REQUEST_S
from tests.contract.api_support import TinyCore, build, hit
from tests.contract.served_app import WAIT_S, ServedApp, connect, request
from tests.support.certificates import OverTls

# The limits are short, so that the tests are, but far above the time of a loopback exchange.
SMALL = HttpLimits(
    max_head_bytes=2_048, max_headers=20, head_timeout_s=1.0, body_timeout_s=1.5, send_timeout_s=1.5, max_connections=8
)
PATIENT = HttpLimits(max_head_bytes=2_048, max_headers=20, max_connections=8)
ASKED = b'{"model": "m", "block_hashes": [1, 2, 3]}'


class Server(ServedApp):
    """The protocol under test on a core with workers; over TLS where `OverTls` says so."""

    def __init__(self, limits: HttpLimits, *, workers: int = 1) -> None:
        self.core = TinyCore([hit(f"w{n}", 16, 32, 48) for n in range(workers)])
        self._tls = OverTls.now
        context = None if self._tls is None else read_certificate(CertificateFiles(*self._tls.server)).context
        super().__init__(build(self.core), limits, context=context)

    def connect(self) -> socket.socket:
        return connect(self.port, self._tls)

    def serves(self) -> bool:
        with self.connect() as client:
            client.sendall(request("/query_by_hash", ASKED))
            return received(client).startswith(b"HTTP/1.1 200 ")


@contextmanager
def running(limits: HttpLimits, *, workers: int = 1) -> Iterator[Server]:
    server = Server(limits, workers=workers)
    try:
        yield server
    finally:
        server.close(force=True)


@pytest.fixture
def small() -> Iterator[Server]:
    with running(SMALL) as server:
        yield server


@pytest.fixture
def patient() -> Iterator[Server]:
    with running(PATIENT) as server:
        yield server


def received(client: socket.socket) -> bytes:
    """Return everything that arrives until the server closes."""
    whole = b""
    try:
        while piece := client.recv(65_536):
            whole += piece
    except ConnectionResetError:
        pass
    return whole


def served(client: socket.socket) -> bool:
    """Ask once on a connection that stays open, and return whether the answer is a success."""
    client.sendall(request("/query_by_hash", ASKED, close=False))
    return client.recv(65_536).startswith(b"HTTP/1.1 200 ")


def code_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return str(json.loads(body)["error"]["code"])


def drips(client: socket.socket, piece: bytes) -> bytes:
    """Send `piece` repeatedly and slowly until the server answers or closes, and return the answer."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            client.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        # A timeout, not select, which also reports records of TLS itself.
        client.settimeout(0.1)
        try:
            first_bytes = client.recv(65_536)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return b""
        client.settimeout(WAIT_S)
        return first_bytes + received(client)
    raise AssertionError("it may go on for ever")


HOT = b"POST /query HTTP/1.1\r\nhost: localhost\r\n"
COLD = b"POST /register HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "piece", "code", "reason"),
    [
        (b"GET /", b"a", "request_timeout", "head_time"),
        (HOT, b"a", "request_timeout", "head_time"),
        (HOT, b"x-a: b\r\n", "request_timeout", "head_time"),
        (HOT + b"content-length: 1000\r\n\r\n", b"x", "request_timeout", "body_time"),
        (COLD + b"content-length: 1000\r\n\r\n", b"x", "request_timeout", "body_time"),
        (HOT + CHUNKED, b"1\r\nx\r\n", "request_timeout", "body_time"),
        (COLD + CHUNKED, b"1\r\nx\r\n", "request_timeout", "body_time"),
        # The parser skips empty lines before a request, so they do not begin one.
        (b"", b"\r\n", "", "head_time"),
        # On a kept connection each byte would postpone uvicorn's own timeout.
        (request("/query_by_hash", ASKED, close=False), b"\r\n", "", "head_time"),
        (request("/query_by_hash", ASKED, close=False) + b"GET /", b"a", "request_timeout", "head_time"),
    ],
)
def test_a_slow_client_is_cut_while_others_are_served(
    small: Server, begun: bytes, piece: bytes, code: str, reason: str
) -> None:
    with small.connect() as slow:
        slow.sendall(begun)
        if ASKED in begun:
            assert slow.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert small.serves()
        answer = drips(slow, piece)
        if code and answer:
            assert code_of(answer) == code
        assert small.cuts() == {reason: 1.0}
    assert small.serves()


def test_a_silent_client_is_cut(small: Server) -> None:
    with small.connect() as silent:
        assert received(silent) == b""
    assert small.cuts() == {"head_time": 1.0}


def test_a_kept_connection_may_be_idle_for_longer_than_a_head_may_take(small: Server) -> None:
    with small.connect() as client:
        for _ in range(2):
            assert served(client)
            time.sleep(2 * SMALL.head_timeout_s)
    assert small.cuts() == {}


def test_an_idle_connection_is_closed_and_one_with_requests_is_kept() -> None:
    limits = HttpLimits(idle_timeout_s=1.5)
    with running(limits) as server, server.connect() as idle, server.connect() as busy:
        assert served(idle)
        for _ in range(6):
            assert served(busy)
            time.sleep(0.5)
        # Twice the idle limit has passed.
        assert select.select([idle], [], [], 0)[0] and idle.recv(1) == b""
        assert received(busy) == b""
        assert server.cuts() == {}


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (b"GET /", b"a" * 100),
        (b"GET / HTTP/1.1\r\nx-a: ", b"b" * 100),
        (b"GET / HTTP/1.1\r\n", b"x" * 100),
        (b"GET / HTTP/1.1\r\n", b"a:b\r\n"),
        (b"", b"\r\n" * 50),
    ],
)
def test_a_head_without_an_end_is_cut(patient: Server, begun: bytes, piece: bytes) -> None:
    with patient.connect() as client:
        client.sendall(begun)
        answer = drips(client, piece)
        assert answer == b"" or code_of(answer) == "head_too_large"
    assert patient.cuts() == {"head_size": 1.0}
    assert patient.serves()


@pytest.mark.parametrize(
    "whole",
    [
        b"GET /" + b"a" * 2_100 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-a: " + b"b" * 2_100 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 21 + b"\r\n",
        HOT + b"a: b\r\n" * 21 + b"content-length: 0\r\n\r\n",
    ],
)
def test_a_head_over_the_limit_is_refused_though_it_came_at_once(patient: Server, whole: bytes) -> None:
    with patient.connect() as client:
        client.sendall(whole)
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert code_of(answer) == "head_too_large"


def test_a_head_just_below_the_limit_is_taken(patient: Server) -> None:
    headers = [f"x-{n}: b" for n in range(SMALL.max_headers - 3)]
    with patient.connect() as client:
        client.sendall(request("/query_by_hash", ASKED, *headers))
        assert received(client).startswith(b"HTTP/1.1 200 ")
    with patient.connect() as client:
        client.sendall(request("/query_by_hash", ASKED, "x-a: " + "b" * (SMALL.max_head_bytes - 150)))
        assert received(client).startswith(b"HTTP/1.1 200 ")
    assert patient.cuts() == {}


@pytest.mark.parametrize(
    ("begun", "piece"),
    [(CHUNKED + b"1;x=", b"y" * 100), (CHUNKED + b"1\r\nx\r\n0\r\na: ", b"b" * 100), (CHUNKED + b"0\r\n", b"a: b\r\n")],
)
@pytest.mark.parametrize("head", [HOT, COLD])
def test_a_body_of_frames_alone_is_cut(patient: Server, head: bytes, begun: bytes, piece: bytes) -> None:
    with patient.connect() as client:
        client.sendall(head + begun)
        drips(client, piece)
    # Only the number of cuts is compared, because the parser has its own limit for long chunk extensions.
    assert sum(patient.cuts().values()) == 1.0


def test_invalid_http_gets_an_error_and_is_counted(patient: Server) -> None:
    with patient.connect() as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert code_of(answer) == "invalid_http"
    assert patient.cuts() == {"invalid": 1.0}


def test_connections_are_bounded_and_their_places_free_again(patient: Server) -> None:
    held = [patient.connect() for _ in range(PATIENT.max_connections)]
    for client in held:
        assert served(client)
    with patient.connect() as late:
        answer = received(late)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert code_of(answer) == "too_many_connections"
    assert patient.cuts() == {"connections": 1.0}
    # Connections that were admitted are still served.
    assert served(held[0])
    for client in held:
        client.close()
    deadline = time.monotonic() + WAIT_S
    while not patient.serves():
        assert time.monotonic() < deadline


def test_a_client_that_reads_no_answers_is_not_read_and_then_cut() -> None:
    with running(SMALL, workers=400) as server, server.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.setblocking(False)
        question = request("/query_by_hash", ASKED, close=False)
        sent = 0
        deadline = time.monotonic() + WAIT_S
        while server.cuts() != {"send_time": 1.0}:
            assert time.monotonic() < deadline
            select.select([], [deaf], [], 0.1)
            try:
                sent += deaf.send(question * 10)
            except BlockingIOError:
                time.sleep(0.05)
            except (BrokenPipeError, ConnectionResetError):
                break
        # An answer is some 200 times as long as a question: the answers to all questions would be 100 MB and more.
        assert sent < 64 * 1024**2
        assert server.serves()
        assert server.cuts() == {"send_time": 1.0}


def test_pipelined_queries_wait_until_their_answers_are_read() -> None:
    # The questions fit in one read, so that no pause in reading can come between; an answer has 60 kB.
    questions = 600
    with running(SMALL, workers=400) as server, server.connect() as deaf:
        deaf.sendall(request("/query_by_hash", ASKED, close=False) * questions)
        deadline = time.monotonic() + WAIT_S
        while not server.cuts():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.cuts() == {"send_time": 1.0}
        # The server answered as many questions as the kernel's buffers hold, and one more, which waits.
        assert 0 < len(server.core.asked) < questions / 2


def test_a_stopping_server_waits_for_clients_about_to_send() -> None:
    """Stop the server while clients may be about to send a request.

    A request that meets a closed connection is lost, because its client cannot know whether it was read.
    """
    with running(HttpLimits(next_request_s=3_600)) as server, server.connect() as new, server.connect() as kept:
        assert served(kept)
        server.end()
        # Connections that may not send another request are closed by then.
        time.sleep(3 * LAST_REQUEST_S)
        for client in (new, kept):
            client.sendall(request("/query_by_hash", ASKED, close=False))
            answer = received(client)
            assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer


def test_a_stopping_server_closes_long_idle_connections() -> None:
    with running(HttpLimits(next_request_s=0)) as server, server.connect() as kept:
        assert served(kept)
        server.end()
        assert received(kept) == b""
