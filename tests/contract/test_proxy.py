# SPDX-License-Identifier: Apache-2.0
"""Traffic through the proxy: unchanged bytes, the right headers and no others, the engine's errors.

The sockets are real.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS
from tests.contract.proxy_support import CHAT, COMPLETIONS, fleet, proxying, worker
from tests.contract.served_app import request as raw_request
from tests.support.scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, Wire, chunk, plain, stream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hällo"}]}
TOKENS = {"model": "m", "prompt": list(range(1, 100)), "max_tokens": 4}
EVENTS = [b'data: {"a": 1}\n\n', "data: héé\n\n".encode(), b"data: [DO", b"NE]\n\n", b"\xff\x00raw"]


@pytest.mark.parametrize(
    "path",
    [*sorted(PATHS), CHAT + "?api-version=1&x=%20"],
)
def test_a_body_and_its_answer_pass_unchanged(path: str) -> None:
    sent = b'  {"model" : "m", "x": 1e400, "prompt":"\\u00e4", "model":"m"}\n'
    engine_answer = b'{"id": "x",   "weird":\t1}\n'
    with (
        ScriptedEngine(plain(engine_answer, headers=["x-more: 1", "x-more: 2"])) as engine,
        proxying(worker("w0", engine.url)) as router,
    ):
        status, headers, answer = router.post(path, sent)
        assert (status, answer) == (200, engine_answer)
        assert headers["content-length"] == str(len(engine_answer))
        assert headers["x-more"] == "2"
        assert "transfer-encoding" not in headers
        (asked,) = engine.asked
        assert (asked.method, asked.target, asked.body) == ("POST", path, sent)


@pytest.mark.parametrize("path", sorted(PATHS - AUDIO))
def test_json_continues_as_json_whatever_it_is_called(path: str) -> None:
    body = b'{"model": "m"}'
    other = "application/x-www-form-urlencoded"
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url)) as router:
        for types, passed in (
            ([], "application/json"),
            ([other], "application/json"),
            (["text/json; charset=utf-8"], "application/json"),
            # vLLM does not recognise a type with a blank behind it.
            (["application/json ; charset=utf-8"], "application/json"),
            (["APPLICATION/json;charset=utf-8"], "APPLICATION/json;charset=utf-8"),
        ):
            router.exchange(raw_request(path, body, *(f"content-type: {content_type}" for content_type in types)))
            assert engine.asked[-1].all("content-type") == [passed]
        assert len(engine.asked) == 5


def test_a_stream_passes_byte_for_byte_and_as_it_comes() -> None:
    with ScriptedEngine(stream(EVENTS)) as engine, proxying(worker("w0", engine.url)) as router:
        status, headers, answer = router.post(CHAT, BODY)
        assert (status, answer) == (200, b"".join(EVENTS))
        assert (headers["content-type"], headers["transfer-encoding"]) == ("text/event-stream", "chunked")


def test_a_piece_of_a_stream_does_not_wait_for_the_next() -> None:
    got: list[bytes] = []

    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(b"first"))
        # Wait until the client has the first piece: without a deadlock, the piece was passed on.
        while not got and not wire.gone.is_set():
            await wire.send()
        await wire.send(chunk(b"second"), b"0\r\n\r\n")

    with ScriptedEngine(script) as engine, proxying(worker("w0", engine.url)) as router, router.connect() as client:
        client.sendall(raw_request(CHAT, json.dumps(BODY).encode()))
        received = b""
        while b"first" not in received:
            received += client.recv(65_536)
        got.append(received)
        while piece := client.recv(65_536):
            received += piece
        assert received.endswith(b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n")


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nx-odd: 1\r\n\r\nfirst ", b"second")
        wire.close()

    with ScriptedEngine(script) as engine, proxying(worker("w0", engine.url)) as router:
        status, headers, answer = router.post(CHAT, BODY)
        assert (status, answer, headers["x-odd"]) == (200, b"first second", "1")
        assert router.post(CHAT, BODY)[2] == b"first second"


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "404 Not Found", "422 Unprocessable", "429 Too Many", "500 Oh", "299 Odd"]
)
def test_an_engines_answer_keeps_its_status_and_body(status: str) -> None:
    body = b'{"object":"error","message":"as the engine says it"}'
    with (
        ScriptedEngine(plain(body, status, ["retry-after: 7"])) as engine,
        proxying(worker("w0", engine.url)) as router,
    ):
        code, headers, answer = router.post(CHAT, BODY)
        assert (code, answer, headers["retry-after"]) == (int(status[:3]), body, "7")
        assert len(engine.asked) == 1


def test_no_content_interim_answers_and_compression_pass() -> None:
    packed = gzip.compress(b"hello" * 100)

    async def script(asked: Asked, wire: Wire) -> None:
        if "empty" in asked.target:
            await wire.send(b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n")
            return
        early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
        await wire.send(early, head + packed)

    with ScriptedEngine(script) as engine, proxying(worker("w0", engine.url)) as router:
        status, headers, answer = router.post(CHAT + "?empty", BODY)
        assert (status, answer, headers["x-a"]) == (204, b"", "b")
        status, headers, answer = router.post(CHAT, BODY, {"accept-encoding": "gzip"})
        assert (status, answer, headers["content-encoding"]) == (200, packed, "gzip")
        assert "link" not in headers
        assert engine.asked[1].all("accept-encoding") == ["gzip"]


def test_the_engine_judges_a_wrong_prompt() -> None:
    with fleet(plain(b"its own words", "400 Bad Request")) as (router, _):
        assert router.post(COMPLETIONS, {"model": "m", "prompt": 7})[::2] == (400, b"its own words")


def test_redirects_go_to_the_client() -> None:
    moved = plain(b"", "307 Temporary Redirect", ["location: http://169.254.169.254/"])
    with ScriptedEngine(moved) as engine, proxying(worker("w0", engine.url)) as router:
        status, headers, _ = router.post(CHAT, BODY)
        assert (status, headers["location"]) == (307, "http://169.254.169.254/")
        assert len(engine.asked) == 1


def test_headers_of_a_connection_stay_on_it() -> None:
    engine_headers = [
        "connection: close, X-Private",
        "x-private: 1",
        "keep-alive: timeout=5",
        "upgrade: h2c",
        "x-public: 1",
        "te: trailers",
    ]
    with ScriptedEngine(plain(b"{}", headers=engine_headers)) as engine, proxying(worker("w0", engine.url)) as router:
        _, headers, _ = router.post(
            CHAT,
            BODY,
            {
                "connection": "keep-alive, x-hop",
                "x-hop": "1",
                "te": "trailers",
                "proxy-authorization": "secret",
                "x-kvrouter-trick": "1",
                "x-public": "1",
                "traceparent": "00-1-2-03",
            },
        )
        assert headers["x-public"] == "1"
        assert not {"x-private", "keep-alive", "upgrade", "te"} & set(headers)
        (asked,) = engine.asked
        names = [name for name, _ in asked.headers]
        assert asked.all("x-public") == ["1"] and asked.all("traceparent") == ["00-1-2-03"]
        assert not {"x-hop", "te", "proxy-authorization", "x-kvrouter-trick", "connection"} & set(names)
        assert asked.all("host") == [f"127.0.0.1:{engine.port}"]
        assert len(names) == len(set(names))


def test_the_answer_names_its_worker() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w ä,0", engine.url, rank=2)) as router:
        _, headers, _ = router.post(COMPLETIONS, TOKENS)
        assert (headers["x-kvrouter-worker"], headers["x-kvrouter-predicted-hit"]) == ("w%20%C3%A4%2C0@2", "96")
        assert len(headers["x-kvrouter-selection-id"]) == 32
        assert "x-kvrouter-retried" not in headers
        _, headers, _ = router.post(CHAT, BODY)
        assert "x-kvrouter-predicted-hit" not in headers


def test_a_request_id_is_kept_or_made() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url)) as router:
        assert router.post(CHAT, BODY, {"X-Request-Id": "mine"})[1]["x-request-id"] == "mine"
        generated = router.post(CHAT, BODY)[1]["x-request-id"]
        assert engine.asked[0].all("x-request-id") == ["mine"]
        assert engine.asked[1].all("x-request-id") == [generated]
        engine.script = plain(b"{}", headers=["x-request-id: the engine's"])
        assert router.post(CHAT, BODY)[1]["x-request-id"] == "the engine's"
        # Errors of the router itself have the id too.
        status, headers, _ = router.post(CHAT, {"model": "nope"}, {"x-request-id": "mine"})
        assert (status, headers["x-request-id"]) == (404, "mine")


def test_a_pinned_request_goes_to_the_pinned_worker() -> None:
    with (
        ScriptedEngine(plain(b"0")) as first,
        ScriptedEngine(plain(b"1")) as second,
        proxying(worker("w0", first.url), worker("w ,1", second.url)) as router,
    ):
        assert router.post(CHAT, BODY)[2] == b"0"
        status, headers, answer = router.post(CHAT, BODY, {"x-kvrouter-worker": "w%20%2C1"})
        assert (status, answer, headers["x-kvrouter-worker"]) == (200, b"1", "w%20%2C1")
        status, _, answer = router.post(CHAT, BODY, {"x-kvrouter-worker": "w7"})
        assert (status, json.loads(answer)["error"]["code"]) == (404, "unknown_worker")
        assert not second.asked[0].all("x-kvrouter-worker")


def test_a_rank_is_named_to_an_engine_that_has_several() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, ScriptedEngine(plain(b"{}")) as alone:
        ranks = [worker("dp", engine.url, rank=rank) for rank in (1, 0)]
        with proxying(*ranks, worker("ext", alone.url, rank=3)) as router:
            router.post(CHAT, BODY, {"X-Data-Parallel-Rank": "7"})
            assert engine.asked[0].all("x-data-parallel-rank") == ["1"]
            router.post(CHAT, BODY, {"x-kvrouter-worker": "ext@3"})
            assert alone.asked[0].all("x-data-parallel-rank") == []
            router.post(CHAT, BODY, {"x-kvrouter-worker": "ext@3", "X-Data-Parallel-Rank": "0"})
            assert alone.asked[1].all("x-data-parallel-rank") == ["0"]


def test_the_path_of_a_registered_url_is_kept() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url + "/models/a/")) as router:
        router.post(CHAT + "?x=1", BODY)
        assert engine.asked[0].target == "/models/a" + CHAT + "?x=1"


LISTED: dict[str, Any] = {"allow_hosts": ("127.0.0.1",)}


@pytest.mark.parametrize(
    ("settings", "sent", "received"),
    [
        ({}, "Bearer engine", ["Bearer engine"]),
        ({}, None, []),
        ({"api_key": "router"}, "Bearer router", []),
        ({"worker_api_key": "engine", **LISTED}, None, ["Bearer engine"]),
        ({"worker_api_key": "engine", **LISTED}, "Bearer mine", ["Bearer engine"]),
        ({"api_key": "router", "worker_api_key": "engine", **LISTED}, "Bearer router", ["Bearer engine"]),
        # A client registered the engine at an address that is not listed, so it gets neither key.
        ({"worker_api_key": "engine"}, "Bearer mine", []),
        ({"worker_api_key": "engine", "allow_hosts": ("localhost", "127.0.0.0/8")}, None, ["Bearer engine"]),
    ],
)
def test_the_engine_gets_its_own_key_or_the_clients(
    settings: dict[str, Any], sent: str | None, received: list[str]
) -> None:
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url), **settings) as router:
        assert router.post(CHAT, BODY, {} if sent is None else {"authorization": sent})[0] == 200
        assert engine.asked[0].all("authorization") == received


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_request_that_meets_a_changed_key_is_sent_again_once(path: str) -> None:
    wanted = "Bearer new"

    async def guarded(asked: Asked, wire: Wire) -> None:
        await plain(b"{}", "200 OK" if asked.all("authorization") == [wanted] else "401 Unauthorized")(asked, wire)

    with (
        ScriptedEngine(guarded) as engine,
        proxying(worker("w0", engine.url), worker_api_key="old", **LISTED) as router,
    ):
        reads: list[str] = []

        async def read() -> None:
            reads.append("")
            router.engine_key.take("new")

        # The file still has the refused key.
        assert router.post(path, BODY)[0] == 401 and len(engine.asked) == 1
        router.engine_key.reader = read
        assert router.post(path, BODY)[0] == 200
        assert [asked.all("authorization") for asked in engine.asked[1:]] == [["Bearer old"], ["Bearer new"]]
        assert engine.asked[1].body == engine.asked[2].body
        assert router.sample("proxy_retries_total", kind="key") == 1 and len(reads) == 1
        wanted = "Bearer another"
        assert router.post(path, BODY)[0] == 401, "the key did not change"
        assert len(engine.asked) == 4 and len(reads) == 2
        assert router.post(path, BODY)[0] == 401 and router.admission.problem(WorkerKey("m", "w0")) is None


def test_without_the_routers_key_nothing_is_forwarded() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url), api_key="k") as router:
        assert router.post(CHAT, BODY)[0] == 401
        assert router.post(CHAT, BODY, {"authorization": "Bearer no"})[0] == 401
        assert not engine.asked


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "malformed_body"),
        (b"[1]", 400, "invalid_body"),
        (b'{"messages": []}', 400, "invalid_model"),
        (b'{"model": 7}', 400, "invalid_model"),
        (b'{"model": "nope"}', 404, "unknown_model"),
        (b'{"model": "m", "x": "' + b"y" * 5_000 + b'"}', 413, "body_too_large"),
        (b'{"x": ' + b"[" * 4_000, 400, "malformed_body"),
    ],
)
def test_the_router_refuses_invalid_bodies_and_unknown_models(body: bytes, status: int, code: str) -> None:
    with (
        ScriptedEngine(plain(b"{}")) as engine,
        proxying(worker("w0", engine.url), worker("v0", engine.url, "other"), max_body_bytes=4_096) as router,
    ):
        got, headers, answer = router.post(CHAT, body)
        assert (got, json.loads(answer)["error"]["code"]) == (status, code)
        assert headers["content-type"] == "application/json"
        assert not engine.asked


def test_an_alias_is_replaced_by_the_engines_name() -> None:
    with fleet(plain(b"{}")) as (router, engine):
        sent = b'{"n":  1.50,"model": "other name", "messages":[ {"content":"\\u00e4"} ]}'
        assert router.post(CHAT, sent)[0] == 200
        assert engine.asked[0].body == b'{"n":1.50,"model":"m","messages":[ {"content":"\\u00e4"} ]}'


def test_a_single_model_need_not_be_named() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url)) as router:
        assert router.post("/detokenize", b'{"tokens": [1]}')[0] == 200


def test_other_methods_and_spellings_get_an_error_with_the_right_one() -> None:
    with (
        ScriptedEngine(plain(b"{}")) as engine,
        proxying(worker("w0", engine.url)) as router,
        router.connect() as client,
    ):
        client.sendall(f"GET {CHAT} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert client.recv(65_536).startswith(b"HTTP/1.1 405 ")
        status, _, answer = router.post("/v1/chat/%63ompletions", BODY)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_path")


def test_only_allowed_addresses_get_requests() -> None:
    with ScriptedEngine(plain(b"{}")) as engine, ScriptedEngine(plain(b"ok")) as allowed:
        far = worker("w0", engine.url.replace("127.0.0.1", "localhost"))
        with proxying(far, worker("w1", None), allow_hosts=("127.0.0.1",)) as router:
            status, _, answer = router.post(CHAT, BODY)
            assert (status, json.loads(answer)["error"]["code"]) == (503, "no_worker")
        with proxying(far, worker("w1", None), worker("w2", allowed.url), allow_hosts=("127.0.0.1",)) as router:
            assert router.post(CHAT, BODY)[2] == b"ok"
            assert router.post(CHAT, BODY, {"x-kvrouter-worker": "w0"})[0] == 503
        assert not engine.asked


def test_the_first_token_and_the_end_of_an_answer_are_reported() -> None:
    with fleet(stream([b"a", b"b"])) as (router, engine):
        router.post(CHAT, BODY)
        engine.script = plain(b"{}")
        # The first byte of a whole answer comes with its last token, so no first token is reported.
        router.post(CHAT, BODY)
        assert [placed.told for placed in router.placer.placed] == [["first token", "done"], ["done"]]


def test_a_placement_is_recorded_before_its_request_waits() -> None:
    with fleet(plain(b"{}")) as (router, _):
        for _ in range(2):
            router.post(CHAT, BODY)
        # The first request waits for its connection, and then for its answer; the second one for its answer alone.
        assert [placed.recorded for placed in router.placer.placed] == [2, 1]


@pytest.mark.parametrize("path", sorted(AUDIO))
@pytest.mark.parametrize("name", ["m", "other name"])
def test_a_form_passes_unchanged_but_for_a_name_of_the_routers(path: str, name: str) -> None:
    kind = "multipart/form-data; boundary=b0"
    parts = (
        b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\r\n--b\xff\r\n'
        b'--b0\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--b0--\r\nepilogue'
    )
    with (
        ScriptedEngine(plain(b'{"text": ""}')) as engine,
        proxying(worker("w0", engine.url), worker("w9", engine.url, "another")) as router,
    ):
        status, headers, _ = router.post(path, parts % name.encode(), {"content-type": kind})
        assert status == 200 and "x-kvrouter-predicted-hit" not in headers
        (asked,) = engine.asked
        assert asked.body == parts % b"m"
        assert (asked.all("content-type"), asked.all("content-length")) == ([kind], [str(len(asked.body))])
        assert router.post(path, parts % b"nobody", {"content-type": kind})[0] == 404
        # Several models are served, so a form that names none cannot be placed.
        assert router.post(path, parts.replace(b"model", b"other") % b"m", {"content-type": kind})[0] == 400
