# SPDX-License-Identifier: Apache-2.0
"""Heads of requests beyond the common case, on each way through the server, as RFC 9112 requires.

They are sent over raw sockets.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.serve.api.http.request import SINGLE, split_target
from tests.contract.proxy_support import CHAT, ProxyServer, fleet, received, until
from tests.contract.served_app import request as raw_request
from tests.support.scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, Wire, chunk, hang, plain

CHAT_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
# A request for each way: proxied, answered by the protocol itself, and by the ASGI application.
WAYS = {
    "proxied": ("POST", CHAT, CHAT_BODY),
    "hot": ("POST", "/query_by_hash", b'{"model": "m", "block_hashes": [1, 2, 3]}'),
    "cold": ("GET", "/version", b""),
}
LINE = "{method} {target} HTTP/1.1"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ProxyServer, ScriptedEngine]]:
    with fleet(plain(b"ok"), allowed_hosts=("x", "other", "*.svc")) as (router, engine):
        yield router, engine


def sent(
    way: str, *headers: str, line: str = LINE, host: str | None = "host: localhost", end: str = "connection: close"
) -> bytes:
    method, target, body = WAYS[way]
    lines = [line.format(method=method, target=target), *([host] if host else []), *headers]
    lines += [f"content-length: {len(body)}"] if body else []
    return "\r\n".join([*lines, *([end] if end else []), "", ""]).encode() + body


def status_of(answer: bytes) -> int:
    assert len(re.findall(rb"HTTP/1\.1 [0-9]{3} ", answer)) == 1, answer
    return int(answer[9:12])


def code_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_a_repeated_deciding_header_is_refused(
    served: tuple[ProxyServer, ScriptedEngine], way: str, name: bytes
) -> None:
    router, engine = served
    requests_before = len(engine.asked)
    header = name.decode()
    for second in (header, header.title()):
        answer = router.exchange(sent(way, f"{header}: a", f"{second}: b"))
        assert (status_of(answer), code_of(answer)) == (400, "repeated_header")
        assert header.encode() in answer and len(engine.asked) == requests_before


@pytest.mark.parametrize("way", WAYS)
def test_exactly_one_valid_host_is_required(served: tuple[ProxyServer, ScriptedEngine], way: str) -> None:
    router, engine = served
    for host in ("x", "", "127.0.0.1:30000", "[::1]:30000", "my_service.ns.svc"):
        assert status_of(router.exchange(sent(way, host=f"host: {host}"))) == 200, host
    requests_before = len(engine.asked)
    for head in (
        sent(way, host=None),
        sent(way, "host: localhost"),
        sent(way, "Host: other"),
        *(sent(way, host=f"host: {host}") for host in ("a b", "a,b/c", "http://x", "x:1:2", "x:port", "u@x", "[::1")),
    ):
        answer = router.exchange(head)
        assert (status_of(answer), code_of(answer)) == (400, "invalid_host"), head
        assert b"connection: close\r\n" in answer
    assert len(engine.asked) == requests_before


@pytest.mark.parametrize("way", WAYS)
def test_http_1_0_needs_no_host_and_gets_no_interim_answer(
    served: tuple[ProxyServer, ScriptedEngine], way: str
) -> None:
    router, _ = served
    old = LINE.replace("1.1", "1.0")
    assert status_of(router.exchange(sent(way, line=old, host=None))) == 200
    answer = router.exchange(sent(way, "host: y", line=old))
    assert (status_of(answer), code_of(answer)) == (400, "invalid_host")
    with router.connect() as client:
        whole = sent(way, "expect: 100-continue", line=old)
        head, _, body = whole.partition(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n")
        time.sleep(0.1)
        client.sendall(body)
        assert status_of(received(client)) == 200


@pytest.mark.parametrize("way", WAYS)
def test_a_target_with_scheme_and_host_means_its_path(served: tuple[ProxyServer, ScriptedEngine], way: str) -> None:
    router, engine = served
    for at in ("http://x", "http://other:8000", "HTTPS://x"):
        answer = router.exchange(sent(way, line=LINE.replace("{target}", at + "{target}?a=b")))
        assert status_of(answer) == 200, at
    if way == "proxied":
        assert engine.asked[-1].target == f"{CHAT}?a=b"
    for at in ("ftp://x", "x:80"):
        answer = router.exchange(sent(way, line=LINE.replace("{target}", at + "{target}")))
        assert status_of(answer) == 400, at


def test_a_target_is_split_into_path_and_host() -> None:
    for target, parts in {
        b"/v1/models?x=http://y": (b"/v1/models?x=http://y", None),
        b"*": (b"*", None),
        b"http://h": (b"/", b"h"),
        b"http://h?x": (b"/?x", b"h"),
        b"http://h:1/a%20b//c?x=1&y": (b"/a%20b//c?x=1&y", b"h:1"),
        b"http://[::1]:1/a": (b"/a", b"[::1]:1"),
    }.items():
        assert split_target(target) == parts
    for wrong in (b"x:443", b"mailto:a", b"", b"ws://h/a"):
        with pytest.raises(BadQuestion):
            split_target(wrong)


def test_connect_and_odd_methods_and_versions_are_answered(served: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, _ = served
    for target in ("engine:443", CHAT, "http://x/"):
        answer = router.exchange(f"CONNECT {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert status_of(answer) in (400, 501), target
    assert code_of(router.exchange(b"CONNECT engine:443 HTTP/1.1\r\nhost: localhost\r\n\r\n")) == "not_supported"
    assert status_of(router.exchange(b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")) == 404
    for method in ("TRACE", "PUT", "OPTIONS", "GET"):
        answer = router.exchange(f"{method} {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        assert (status_of(answer), b"allow: POST\r\n" in answer) == (405, True), method
    for version in ("HTTP/2.0", "HTTP/0.9"):
        for path in (CHAT, "/version"):
            answer = router.exchange(f"POST {path} {version}\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
            assert (status_of(answer), code_of(answer)) == (505, "http_version_not_supported")
    assert status_of(router.exchange(b"GET /version\r\n\r\n")) == 505


@pytest.mark.parametrize("way", ["proxied", "hot"])
def test_a_body_has_one_length_and_no_coding_but_chunked(served: tuple[ProxyServer, ScriptedEngine], way: str) -> None:
    router, engine = served
    requests_before = len(engine.asked)
    for header in ("content-length: 1", "transfer-encoding: chunked", "transfer-encoding: identity"):
        assert status_of(router.exchange(sent(way, header))) in (400, 501), header
    method, target, body = WAYS[way]
    for coding in ("gzip, chunked", "gzip", "chunked, identity", "chunked\r\ntransfer-encoding: chunked"):
        lines = [LINE.format(method=method, target=target), "host: localhost", f"transfer-encoding: {coding}", "", ""]
        answer = router.exchange("\r\n".join(lines).encode() + chunk(body) + b"0\r\n\r\n")
        assert status_of(answer) in (400, 501), coding
    assert len(engine.asked) == requests_before


def test_trailers_of_a_request_are_not_headers(served: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, engine = served
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    trailers = b"0\r\nauthorization: Bearer other\r\nx-request-id: other\r\nx-kvrouter-worker: other\r\nx-own: 1\r\nhost: y\r\n\r\n"
    assert status_of(router.exchange(head + chunk(CHAT_BODY) + trailers)) == 200
    last = engine.asked[-1]
    assert not last.all("authorization") and not last.all("x-own") and last.all("x-request-id") != ["other"]


@pytest.mark.parametrize("way", WAYS)
def test_an_upgrade_with_a_body_is_refused_and_ignored_without_one(
    served: tuple[ProxyServer, ScriptedEngine], way: str
) -> None:
    router, _ = served
    answer = router.exchange(sent(way, "upgrade: h2c", end="connection: upgrade, http2-settings"))
    if way == "cold":
        # This is the request of curl --http2. Nothing can follow it, because the parser takes what follows for the
        # other protocol.
        assert status_of(answer) == 200 and b"connection: close\r\n" in answer
    else:
        assert (status_of(answer), code_of(answer)) == (400, "upgrade_not_supported")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("apart", [False, True], ids=["with the request", "behind it"])
def test_a_client_that_closes_its_half_after_a_request_gets_the_answer(
    served: tuple[ProxyServer, ScriptedEngine], way: str, apart: bool
) -> None:
    router, _ = served
    for line in (LINE, LINE.replace("1.1", "1.0")):
        with router.connect() as client:
            client.sendall(sent(way, line=line, end=""))
            if apart:
                time.sleep(0.01)
            client.shutdown(socket.SHUT_WR)
            answer = received(client)
            assert answer.count(b" 200 OK\r\n") == 1, answer


@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_closes_its_half_during_computation_gets_the_whole_stream(requests: int) -> None:
    go_on: list[bool] = []

    async def script(asked: Asked, wire: Wire) -> None:
        while not go_on:
            await asyncio.sleep(0.01)
        await wire.send(STREAM_HEAD)
        for _ in range(300):
            await wire.send(chunk(b"x" * 65_536))
        await wire.send(b"0\r\n\r\n")

    with fleet(script) as (router, engine), router.connect() as client:
        client.sendall(raw_request(CHAT, CHAT_BODY, close=False) * requests)
        client.shutdown(socket.SHUT_WR)
        until(lambda: len(engine.asked) == 1, "the first is at the engine")
        # Long enough for several checks of whether the client still reads.
        time.sleep(0.5)
        go_on.append(True)
        answer = received(client)
        # The answer is more than the kernel buffers, so the router stopped reading and continued.
        assert answer.count(b"x" * 1_000) >= requests * 300 * 64 and answer.count(b"HTTP/1.1 200 OK") == requests
        assert answer.endswith(b"\r\n0\r\n\r\n")
        # With a second request behind the first, the end is not read before the first is answered.
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") == (requests == 1)
        assert not engine.given_up


def test_a_client_that_closes_its_half_within_a_request_has_hung_up() -> None:
    with fleet(hang) as (router, engine):
        whole = raw_request(CHAT, CHAT_BODY)
        for part in (b"", whole[:20], whole[:-5]):
            with router.connect() as client:
                client.sendall(part)
                client.shutdown(socket.SHUT_WR)
                assert received(client) == b""
        assert not engine.asked


def test_closing_the_other_half_later_ends_the_stream_at_the_engine() -> None:
    async def endless(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD)
        while not wire.gone.is_set():
            await wire.send(chunk(b"more"))
            await asyncio.sleep(0.01)

    with fleet(endless) as (router, engine):
        client = router.connect()
        client.sendall(raw_request(CHAT, CHAT_BODY))
        client.shutdown(socket.SHUT_WR)
        until(lambda: b"more" in client.recv(1_000), "it streams")
        assert not engine.given_up
        client.close()
        until(lambda: engine.given_up == 1, "the engine's request ended")
        until(lambda: router.sample("proxy_open_requests") == 0, "it is over")
