# SPDX-License-Identifier: Apache-2.0
"""The hot endpoints over a real socket: what the short way in uvicorn's protocol sends equals what the ASGI application
sends."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

# pytest's importlib mode leaves sys.path alone.
from api_support import TinyCore, TinyTokens, build, hit

from kvrouter.router.api.http.hot_protocol import hot_protocol

GOOD = json.dumps({"model": "m", "block_hashes": list(range(1, 400))}).encode()
LIMIT_BYTES = 4_096


class Server:
    """uvicorn in a thread, with or without the short way."""

    def __init__(self, *, short: bool, api_key: str | None = None) -> None:
        self.core = TinyCore([hit("w0", 16, 32, 48)])
        app, _ = build(self.core, tokens=TinyTokens(), max_body_bytes=LIMIT_BYTES, api_key=api_key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        http = hot_protocol(app) if short else "httptools"
        config = uvicorn.Config(
            app, http=http, ws="none", lifespan="off", log_config=None, server_header=False, date_header=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[self._socket])))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    def exchange(self, *pieces: bytes) -> bytes:
        """Everything the server sends until it closes, after our side sent `pieces` one by one."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                client.sendall(piece)
                # Apart, so that they arrive as pieces.
                threading.Event().wait(0.02 if len(pieces) > 1 else 0)
            client.shutdown(socket.SHUT_WR) if not pieces[-1] else None
            received = b""
            while piece := client.recv(65_536):
                received += piece
            return received


def request(path: str, body: bytes, *headers: str, method: str = "POST", close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, *(["connection: close"] if close else []), "", ""]).encode() + body


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    made = Server(short=True), Server(short=False)
    yield made
    for server in made:
        server.close()


ASKED = request("/query_by_hash", GOOD)


def text(prompt: str, *, close: bool = True) -> bytes:
    return request("/select", json.dumps({"model": "m", "prompt": prompt}).encode(), close=close)


CASES = {
    "an answer": (ASKED,),
    "msgpack wanted": (request("/query_by_hash", GOOD, "accept: application/msgpack"),),
    "a bad body": (request("/query_by_hash", b"{"),),
    "an unknown model": (request("/query", b'{"model": "nope", "token_ids": [1]}'),),
    "a wrong method": (request("/select", b"", method="GET"),),
    "a body in pieces": (ASKED[:60], ASKED[60:500], ASKED[500:]),
    "a body in chunks": (
        b"POST /query_by_hash HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD),
    ),
    "three pipelined": (
        request("/query_by_hash", GOOD, close=False) + request("/health", b"", method="GET", close=False) + ASKED,
    ),
    "HTTP/1.0": (ASKED.replace(b"HTTP/1.1", b"HTTP/1.0"),),
    "expecting 100": (request("/query_by_hash", GOOD, "expect: 100-continue"),),
    "a text": (text("Paris"),),
    "a text that is refused": (text("refused"),),
    "a text that meets a bug": (text("bug"),),
    "texts and hashes pipelined": (
        text("Paris", close=False) + request("/query_by_hash", GOOD, close=False) + text("x", close=False) + ASKED,
    ),
    "a text in HTTP/1.0": (text("Paris").replace(b"HTTP/1.1", b"HTTP/1.0"),),
    "a query string": (request("/query_by_hash?x=1", GOOD),),
}  # fmt: skip


def canonical(answer: bytes) -> list[bytes]:
    """Lines of heads and bodies; uvicorn orders its own headers as it likes, and each selection has an id of its
    own."""
    answer = re.sub(rb'"selection_id":"[0-9a-f]{32}"', b"", answer)
    return sorted(answer.replace(b"\r\n", b"\n").split(b"\n"))


@pytest.mark.parametrize("case", list(CASES))
def test_both_ways_send_the_same(servers: tuple[Server, Server], case: str) -> None:
    short, asgi = (server.exchange(*CASES[case]) for server in servers)
    assert short.startswith(b"HTTP/1.1 ")
    assert canonical(short) == canonical(asgi)


def test_a_body_over_the_limit_is_refused_before_it_is_whole(servers: tuple[Server, Server]) -> None:
    head = f"POST /query HTTP/1.1\r\nhost: x\r\ncontent-length: {10**9}\r\n\r\n".encode()
    answer = servers[0].exchange(head, b"x" * (LIMIT_BYTES + 1))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer and answer.count(b"HTTP/1.1") == 1


def test_a_kept_connection_serves_again(servers: tuple[Server, Server]) -> None:
    with socket.create_connection(("127.0.0.1", servers[0].port), timeout=10) as client:
        for _ in range(3):
            client.sendall(request("/query_by_hash", GOOD, close=False))
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("header", "status"), [("Bearer right", b"200"), ("Bearer wrong", b"401"), ("", b"401")])
def test_the_key_is_asked_for_on_both_ways(header: str, status: bytes) -> None:
    answers = []
    for short in (True, False):
        server = Server(short=short, api_key="right")
        try:
            given = [f"authorization: {header}"] if header else []
            answers.append(server.exchange(request("/query_by_hash", GOOD, *given)))
        finally:
            server.close()
    assert answers[0].startswith(b"HTTP/1.1 " + status)
    assert canonical(answers[0]) == canonical(answers[1])


def test_pipelined_texts_are_answered_in_order(servers: tuple[Server, Server]) -> None:
    answer = servers[0].exchange(text("Paris", close=False) + request("/version", b"", method="GET"))
    assert [b"selection_id" in part for part in answer.split(b"HTTP/1.1 ")[1:]] == [True, False]


def test_a_client_that_hangs_up_while_its_text_is_read_leaves_nothing(servers: tuple[Server, Server]) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", servers[0].port), timeout=10) as client:
            client.sendall(text("Paris", close=False))
    assert servers[0].exchange(text("Paris")).startswith(b"HTTP/1.1 200 ")
