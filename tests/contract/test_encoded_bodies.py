# SPDX-License-Identifier: Apache-2.0
"""Request bodies with a content coding, at every door of the HTTP port: as if the client had sent them plain."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import openai
import pytest

from kvrouter.router.base.common.content_coding import BodyDecoder
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS
from tests.contract.api_support import TinyCore, build, call, hit
from tests.contract.proxy_support import (
    CHAT,
    COMPLETIONS,
    OK,
    ProxyServer,
    code,
    fleet,
    proxying,
    received,
    until,
    worker,
)
from tests.contract.served_app import request as raw_request
from tests.support.compressing_client import compressing
from tests.support.compression import CODINGS, COMPRESS, bomb, wide_zstd
from tests.support.scripted_engine import ScriptedEngine, plain

LIMIT_BYTES = 1024**2
BODY = {"model": "m", "prompt": list(range(1, 100)), "max_tokens": 4}
RAW = json.dumps(BODY).encode()
OUTCOMES = ("decoded", "unsupported", "too_large", "broken")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ProxyServer, ScriptedEngine]]:
    with (
        ScriptedEngine(OK) as engine,
        proxying(worker("w0", engine.url), max_body_bytes=LIMIT_BYTES) as router,
    ):
        yield router, engine


def counts(router: ProxyServer) -> dict[str, float]:
    """Return how many encoded bodies there were by outcome, without zeros."""
    by_outcome = {outcome: router.sample("encoded_bodies_total", outcome=outcome) for outcome in OUTCOMES}
    return {outcome: count for outcome, count in by_outcome.items() if count}


def added(router: ProxyServer, before: dict[str, float]) -> dict[str, float]:
    return {outcome: more for outcome, count in counts(router).items() if (more := count - before.get(outcome, 0))}


def encoded(body: bytes, coding: str) -> tuple[bytes, dict[str, str]]:
    return COMPRESS[coding](body), {"content-encoding": coding}


def some_body(rng: Random) -> bytes:
    """Return a completion that an engine would take, of some bytes or of some hundred kB."""
    body: dict[str, Any] = {"model": rng.choice(["m", "other name"])}
    length = rng.choice([0, 1, 40, 3_000, 60_000])
    body["prompt"] = rng.choice([[rng.randrange(150_000) for _ in range(length)], "text " * length])
    if rng.random() < 0.5:
        body["max_tokens"] = rng.randrange(1, 100)
    if rng.random() < 0.5:
        body["cache_salt"] = rng.choice(["", "ä", "s"])
    raw = json.dumps(body, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
    return rng.choice([raw, raw, b" " + raw + b"\n", raw[:-1]])


def test_any_body_is_placed_and_forwarded_as_if_it_had_come_plain(served: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, engine = served
    rng, requests = Random(32), router.placer.requests

    def facts(raw: bytes, headers: dict[str, str]) -> Any:
        """Return the outcome, the placed question and the forwarded request of a body."""
        placed, asked = len(requests), len(engine.asked)
        status, _, answer = router.post(COMPLETIONS, raw, {"x-session-id": "s", "x-request-id": "r", **headers})
        forwarded = [(request.body, request.headers) for request in engine.asked[asked:]]
        questions = []
        for request in requests[placed:]:
            question = request.question
            ids = None if question.token_ids is None else question.token_ids.tolist()
            named = (question.model, question.cache_salt, question.num_tokens, ids)
            questions.append((named, request.session_id, request.max_tokens))
        return status, answer, questions, forwarded

    for _ in range(60):
        raw = some_body(rng)
        expected = facts(raw, {})
        assert expected[0] in (200, 400) and (expected[0] == 200) == (len(expected[3]) == 1)
        for coding in COMPRESS:
            body, headers = encoded(raw, coding)
            assert facts(body, headers) == expected, (coding, raw[:200])


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("path", sorted(PATHS - AUDIO))
def test_every_proxied_path_takes_an_encoded_body(
    served: tuple[ProxyServer, ScriptedEngine], path: str, coding: str
) -> None:
    router, engine = served
    raw = b'{"model": "m"}'
    assert router.post(path, *encoded(raw, coding))[0] == 200
    request = engine.asked[-1]
    assert (request.body, request.all("content-encoding"), request.all("content-length")) == (raw, [], [str(len(raw))])


@pytest.mark.parametrize("coding", CODINGS)
def test_an_encoded_form_is_forwarded_as_the_form(served: tuple[ProxyServer, ScriptedEngine], coding: str) -> None:
    router, engine = served
    form = b'--b0\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b0--\r\n'
    body, headers = encoded(form, coding)
    headers["content-type"] = "multipart/form-data; boundary=b0"
    assert router.post(min(AUDIO), body, headers)[0] == 200
    assert (engine.asked[-1].body, engine.asked[-1].all("content-encoding")) == (form, [])


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_in_chunks_with_an_alias_and_expect_is_decoded(
    served: tuple[ProxyServer, ScriptedEngine], coding: str
) -> None:
    router, engine = served
    packed = COMPRESS[coding](json.dumps(BODY | {"model": "other name"}).encode())
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in packed) + b"0\r\n\r\n"
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-encoding: {coding}\r\ntransfer-encoding: chunked\r\n"
        "connection: close\r\nexpect: 100-continue\r\n\r\n"
    )
    answer = router.exchange(head.encode() + chunks)
    assert b"HTTP/1.1 200 " in answer
    assert json.loads(engine.asked[-1].body) == BODY
    assert engine.asked[-1].all("transfer-encoding") == engine.asked[-1].all("content-encoding") == []


def test_pipelined_requests_are_answered_in_order_whatever_their_coding(
    served: tuple[ProxyServer, ScriptedEngine],
) -> None:
    router, engine = served
    sent = b""
    for number, coding in enumerate(("gzip", "", "zstd", "identity", "gzip")):
        body = json.dumps(BODY | {"max_tokens": number + 1}).encode()
        lines = [f"content-encoding: {coding}"] if coding else []
        sent += raw_request(COMPLETIONS, COMPRESS.get(coding, bytes)(body), *lines, close=number == 4)
    first = len(engine.asked)
    answer = router.exchange(sent)
    assert answer.count(b"HTTP/1.1 200 ") == 5
    assert [json.loads(request.body)["max_tokens"] for request in engine.asked[first:]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("coding", CODINGS)
def test_openais_client_may_compress_what_it_sends(coding: str) -> None:
    answer = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [], "usage": None}
    with fleet(plain(json.dumps(answer).encode())) as (router, engine):
        with openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="x", max_retries=0, http_client=compressing(coding)
        ) as client:
            client.completions.create(model="m", prompt=list(range(1, 100)), max_tokens=4)
        (request,) = engine.asked
        assert json.loads(request.body) == BODY
        (placed,) = router.placer.requests
        assert placed.question.token_ids is not None and placed.question.token_ids.tolist() == BODY["prompt"]
        assert counts(router) == {"decoded": 1}


# Doors of the router's own API: two of the fast ones, and one behind FastAPI.
OWN_DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/query", {"model": "m", "token_ids": [1, 2, 3]}),
    ("/query_by_hash", {"model": "m", "block_hashes": [1, 2]}),
    ("/select", {"model": "m", "token_ids": [1, 2, 3]}),
    ("/v1/query", {"model": "m", "token_ids": list(range(80_000))}),
    ("/register", {"model": "m", "worker_id": "w9", "endpoint": "tcp://127.0.0.1:1"}),
]


@pytest.mark.parametrize(("path", "body"), OWN_DOORS)
def test_the_routers_own_paths_answer_an_encoded_body_as_a_plain_one(path: str, body: dict[str, Any]) -> None:
    def answer(raw: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        app = build(TinyCore([hit("w0", 64, 128, 192)]))[0]
        answered = call(app, "POST", path, raw, headers=headers)
        return answered.status, answered.json()

    raw = json.dumps(body).encode()
    expected = answer(raw, {})
    assert expected[0] in (200, 201)
    for coding in COMPRESS:
        assert answer(*encoded(raw, coding)) == expected


def test_what_has_no_body_has_no_coding(served: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, _ = served
    before = counts(router)
    for coding in (b"gzip", b"br"):
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-encoding: %b\r\n\r\n"
        answer = router.exchange(head % coding)
        assert answer.startswith(b"HTTP/1.1 200 ")
    answer = router.exchange(raw_request("/reservations/none/prefill_complete", b"", "content-encoding: gzip"))
    assert answer.startswith(b"HTTP/1.1 404 ") and b"unknown_selection" in answer
    assert added(router, before) == {}


PATHS_REFUSED = [COMPLETIONS, "/query", "/select", "/register", "/tokenize"]


@pytest.mark.parametrize("path", PATHS_REFUSED)
@pytest.mark.parametrize("values", [["br"], ["deflate"], ["gzip, zstd"], ["gzip", "zstd"], ["gzip", "gzip"]])
def test_another_coding_and_a_second_one_are_415_with_what_is_accepted(
    served: tuple[ProxyServer, ScriptedEngine], path: str, values: list[str]
) -> None:
    router, engine = served
    before, asked = counts(router), len(engine.asked)
    lines = [f"Content-Encoding: {value}" for value in values]
    head, _, body = router.exchange(raw_request(path, b"x" * 9, *lines)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 415 Unsupported Media Type\r\n")
    assert b"\r\naccept-encoding: gzip, zstd, identity\r\n" in head + b"\r\n"
    message = json.loads(body)["error"]["message"]
    assert code(body) == "unsupported_content_encoding"
    assert repr(", ".join(values)) in message and "gzip, zstd, identity" in message
    assert added(router, before) == {"unsupported": 1} and len(engine.asked) == asked


@pytest.mark.parametrize("path", PATHS_REFUSED)
@pytest.mark.parametrize(
    ("coding", "body", "status", "wanted", "outcome"),
    [
        ("gzip", COMPRESS["gzip"](RAW)[:-1], 400, "malformed_encoding", "broken"),
        ("zstd", COMPRESS["zstd"](RAW)[:-1], 400, "malformed_encoding", "broken"),
        ("gzip", COMPRESS["gzip"](RAW) + b"garbage", 400, "malformed_encoding", "broken"),
        ("zstd", RAW, 400, "malformed_encoding", "broken"),
        ("zstd", wide_zstd(RAW), 400, "malformed_encoding", "broken"),
        ("gzip", bomb("gzip", 64 * LIMIT_BYTES), 413, "body_too_large", "too_large"),
        ("zstd", bomb("zstd", 64 * LIMIT_BYTES), 413, "body_too_large", "too_large"),
    ],
    ids=lambda value: "body" if isinstance(value, bytes) else str(value),
)
def test_what_cannot_be_decoded_is_refused_with_its_reason(
    served: tuple[ProxyServer, ScriptedEngine],
    path: str,
    coding: str,
    body: bytes,
    status: int,
    wanted: str,
    outcome: str,
) -> None:
    router, engine = served
    before, asked = counts(router), len(engine.asked)
    answered, _, answer = router.post(path, body, {"content-encoding": coding})
    assert (answered, code(answer)) == (status, wanted)
    assert added(router, before) == {outcome: 1} and len(engine.asked) == asked


def test_a_refused_body_leaves_the_connection_to_the_next_request(served: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, _ = served
    cut = COMPRESS["gzip"](RAW)[:-1]
    first = raw_request(COMPLETIONS, cut, "content-encoding: gzip", close=False)
    second = raw_request(COMPLETIONS, b"any", "content-encoding: br", close=False)
    with router.connect() as client:
        client.sendall(first + second + raw_request(COMPLETIONS, RAW))
        answer = received(client)
    assert re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", answer) == [b"400", b"415", b"200"]


def test_a_client_that_hangs_up_while_its_body_is_decoded_is_no_bug(
    served: tuple[ProxyServer, ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, engine = served
    begun, ends = threading.Event(), threading.Event()
    whole = BodyDecoder.whole

    def slow(decoder: BodyDecoder) -> bytes:
        begun.set()
        assert ends.wait(30)
        return whole(decoder)

    monkeypatch.setattr(BodyDecoder, "whole", slow)
    asked = len(engine.asked)
    with router.connect() as client:
        client.sendall(raw_request(COMPLETIONS, *with_lines(json.dumps(BODY | {"x": "y" * 600_000}).encode())))
        assert begun.wait(30)
        # The client resets the connection. Closing it would look as if it had sent its last request and still read.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not router.server.server_state.connections, "the router has seen the reset")
    # The loop serves others while the thread decodes.
    assert router.post(COMPLETIONS, RAW)[0] == 200
    ends.set()
    assert router.post(COMPLETIONS, RAW)[0] == 200
    until(lambda: not router.server.server_state.tasks, "the body is decoded")
    assert len(engine.asked) == asked + 2
    assert router.sample("internal_errors_total", where=COMPLETIONS) == 0


def with_lines(body: bytes) -> tuple[bytes, str]:
    return COMPRESS["gzip"](body), "content-encoding: gzip"


@pytest.mark.parametrize(("size", "elsewhere"), [(1_000, False), (600_000, True)])
def test_a_body_that_decodes_to_much_is_decoded_beside_the_loop(
    served: tuple[ProxyServer, ScriptedEngine], monkeypatch: pytest.MonkeyPatch, size: int, elsewhere: bool
) -> None:
    router, _ = served
    threads: list[int] = []
    whole: Callable[[BodyDecoder], bytes] = BodyDecoder.whole

    def observed(decoder: BodyDecoder) -> bytes:
        threads.append(threading.get_ident())
        return whole(decoder)

    monkeypatch.setattr(BodyDecoder, "whole", observed)
    loop_thread = []
    router.on_loop(lambda: loop_thread.append(threading.get_ident()))
    body, headers = encoded(json.dumps(BODY | {"x": "y" * size}).encode(), "zstd")
    assert router.post(CHAT, body, headers)[0] == 200
    assert (threads != loop_thread) == elsewhere
