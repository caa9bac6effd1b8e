# SPDX-License-Identifier: Apache-2.0
"""Requests of hot and cold paths over a real socket: in pieces, pipelined, refused, in order."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.contract.api_support import TinyCore, TinyTokens, build, hit
from tests.contract.proxy_support import received
from tests.contract.served_app import ServedApp, connect, request

GOOD = json.dumps({"model": "m", "block_hashes": list(range(1, 400))}).encode()
LIMIT_BYTES = 4_096


class Server(ServedApp):
    def __init__(self, *, api_key: str | None = None) -> None:
        core = TinyCore([hit("w0", 16, 32, 48)])
        super().__init__(build(core, tokens=TinyTokens(), max_body_bytes=LIMIT_BYTES, api_key=api_key))

    def exchange(self, *pieces: bytes) -> bytes:
        """Send `pieces` one by one, and return everything that the server sends until it closes."""
        with connect(self.port) as client:
            for piece in pieces:
                client.sendall(piece)
                # The pauses make the pieces arrive separately.
                threading.Event().wait(0.02 if len(pieces) > 1 else 0)
            client.shutdown(socket.SHUT_WR) if not pieces[-1] else None
            return received(client)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    instance = Server()
    yield instance
    instance.close()


ASKED = request("/query_by_hash", GOOD)


def text(prompt: str, *, close: bool = True) -> bytes:
    return request("/select", json.dumps({"model": "m", "prompt": prompt}).encode(), close=close)


# The pieces that are sent, and the status of each answer in order.
CASES = {
    "an answer": ((ASKED,), [200]),
    "a bad body": ((request("/query_by_hash", b"{"),), [400]),
    "an unknown model": ((request("/query", b'{"model": "nope", "token_ids": [1]}'),), [404]),
    "a wrong method": ((request("/select", b"", method="GET"),), [405]),
    "a body in pieces": ((ASKED[:60], ASKED[60:500], ASKED[500:]), [200]),
    "a body in chunks": (
        (
            b"POST /query_by_hash HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD),
        ),
        [200],
    ),
    "three pipelined": (
        (request("/query_by_hash", GOOD, close=False) + request("/health", b"", method="GET", close=False) + ASKED,),
        [200, 200, 200],
    ),
    "HTTP/1.0": ((ASKED.replace(b"HTTP/1.1", b"HTTP/1.0"),), [200]),
    "expecting 100": ((request("/query_by_hash", GOOD, "expect: 100-continue"),), [100, 200]),
    "expecting 100 in HTTP/1.0": (
        (request("/query_by_hash", GOOD, "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"),),
        [200],
    ),
    "expecting 100 behind another one": (
        (request("/query_by_hash", GOOD, close=False), request("/query_by_hash", GOOD, "expect: 100-continue")),
        [200, 100, 200],
    ),
    "a text": ((text("Paris"),), [200]),
    "a text that is refused": ((text("refused"),), [400]),
    "a text that meets a bug": ((text("bug"),), [500]),
    "texts and hashes pipelined": (
        (text("Paris", close=False) + request("/query_by_hash", GOOD, close=False) + text("x", close=False) + ASKED,),
        [200, 200, 200, 200],
    ),
    "a refusal between others": (
        (text("Paris", close=False) + request("/query_by_hash", b"{", close=False) + ASKED,),
        [200, 400, 200],
    ),
    "a text in HTTP/1.0": ((text("Paris").replace(b"HTTP/1.1", b"HTTP/1.0"),), [200]),
    "a query string": ((request("/query_by_hash?x=1", GOOD),), [200]),
    "escapes": ((request("/query%5Fby_hash", GOOD),), [200]),
}


def statuses(answers: bytes) -> list[int]:
    """Return the status of each answer, and check the length of each body."""
    codes = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        codes.append(int(head.split()[1]))
        length = re.search(rb"content-length: (\d+)", head)
        answers = answers[int(length[1]) :] if length else answers
    return codes


@pytest.mark.parametrize("case", list(CASES))
def test_requests_are_answered_in_their_order(server: Server, case: str) -> None:
    pieces, expected = CASES[case]
    assert statuses(server.exchange(*pieces)) == expected


def test_a_head_request_is_answered_without_a_body(server: Server) -> None:
    head, _, body = server.exchange(request("/health", b"", method="HEAD")).partition(b"\r\n\r\n")
    assert (head.split()[1], body) == (b"405", b"")
    assert b"content-length" in head


def test_msgpack_is_answered_where_it_is_accepted(server: Server) -> None:
    head, _, body = server.exchange(request("/query_by_hash", GOOD, "accept: application/msgpack")).partition(
        b"\r\n\r\n"
    )
    assert b"content-type: application/msgpack" in head
    assert set(msgspec.msgpack.decode(body)["instances"]) == {"w0"}


def test_a_body_over_the_limit_is_refused_before_it_is_whole(server: Server) -> None:
    head = f"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: {10**9}\r\n\r\n".encode()
    answer = server.exchange(head, b"x" * (LIMIT_BYTES + 1))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer and answer.count(b"HTTP/1.1") == 1


def test_a_kept_connection_serves_again(server: Server) -> None:
    with connect(server.port) as client:
        for _ in range(3):
            client.sendall(request("/query_by_hash", GOOD, close=False))
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("header", "status"), [("Bearer right", 200), ("Bearer wrong", 401), ("", 401)])
@pytest.mark.parametrize("path", ["/query_by_hash", "/nowhere"])
def test_the_key_is_checked_before_the_body_is_read(path: str, header: str, status: int) -> None:
    server = Server(api_key="right")
    try:
        key_headers = [f"authorization: {header}"] if header else []
        # The body of a refused request is skipped, and the connection stays usable.
        sent = request(path, GOOD, *key_headers, close=False) + request("/health", b"", method="GET")
        expected = 404 if (status, path) == (200, "/nowhere") else status
        assert statuses(server.exchange(sent)) == [expected, 200]
        if status == 401:
            with connect(server.port) as client:
                client.sendall(request(path, GOOD, *key_headers)[:-10])
                assert client.recv(65_536).startswith(b"HTTP/1.1 401 ")
    finally:
        server.close()


def test_pipelined_texts_are_answered_in_order(server: Server) -> None:
    answer = server.exchange(text("Paris", close=False) + request("/version", b"", method="GET"))
    assert [b"selection_id" in part for part in answer.split(b"HTTP/1.1 ")[1:]] == [True, False]


def test_a_client_that_hangs_up_while_its_text_is_read_leaves_nothing(server: Server) -> None:
    for _ in range(5):
        with connect(server.port) as client:
            client.sendall(text("Paris", close=False))
    assert server.exchange(text("Paris")).startswith(b"HTTP/1.1 200 ")
