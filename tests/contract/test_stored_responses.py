# SPDX-License-Identifier: Apache-2.0
"""The paths of a stored response at the proxy: which engine gets what, methods, labels, and answers of engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus

import pytest

from kvrouter.router.base.common.errors import BadQuestion, Conflict
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.quality.response_id import MAX_HEAD_BYTES
from tests.contract.picker_support import Door
from tests.contract.proxy_support import ProxyServer, code, proxying, worker
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain, stream

RESPONSES = "/v1/responses"
USAGE = b'"usage":{"input_tokens":20,"output_tokens":5}'
ANSWER = b'{"id":"resp_1","object":"response",' + USAGE + b"}"
BODY = {"model": "m", "input": "a"}
TURN = BODY | {"previous_response_id": "resp_1"}
QUERY = "?stream=true&starting_after=4"
PATHS = [
    ("GET", f"{RESPONSES}/resp_1"),
    ("DELETE", f"{RESPONSES}/resp_1"),
    ("POST", f"{RESPONSES}/resp_1/cancel"),
    ("GET", f"{RESPONSES}/resp_1/input_items"),
]


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ScriptedEngine(plain(ANSWER))) for _ in range(2)]


@pytest.fixture
def server(engines: list[ScriptedEngine]) -> Iterator[ProxyServer]:
    with proxying(*(worker(f"w{number}", engine.url) for number, engine in enumerate(engines))) as server:
        yield server


def send(server: ProxyServer, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    client = server.http_client()
    try:
        client.request(method, path, headers=headers)
        answer = client.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        client.close()


def make(server: ProxyServer, worker: str = "w1", **more: object) -> None:
    assert server.post(RESPONSES, BODY | more, {"x-kvrouter-worker": worker})[0] == HTTPStatus.OK


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_the_owner_gets_the_request_as_it_is(
    server: ProxyServer, engines: list[ScriptedEngine], method: str, path: str
) -> None:
    make(server)
    seen: list[Asked] = []

    async def answer(asked: Asked, wire: Wire) -> None:
        seen.append(asked)
        await plain(b'{"from":"w1"}')(asked, wire)

    engines[1].script = engines[1].pages[path + QUERY] = answer
    status, headers, body = send(server, method, path + QUERY, accept="text/x", **{"x-kvrouter-worker": "w0"})
    assert (status, headers["x-kvrouter-worker"], body) == (HTTPStatus.OK, "w1", b'{"from":"w1"}')
    (asked,) = seen
    assert (asked.method, asked.target, asked.body) == (method, path + QUERY, b"")
    assert asked.all("accept") == ["text/x"] and not asked.all("x-kvrouter-worker")
    assert not engines[0].asked and not engines[0].looked
    label = path.replace("resp_1", "{response_id}")
    assert server.sample("proxy_requests_total", path=label, outcome="ok") == 1
    assert server.sample("requests_total", path=label, code="200") == 1
    labels = [
        value for family in server.registry.collect() for sample in family.samples for value in sample.labels.values()
    ]
    assert not [value for value in labels if "resp_1" in value]


def test_an_owner_that_refuses_or_has_no_such_path_answers_itself(
    server: ProxyServer, engines: list[ScriptedEngine]
) -> None:
    make(server)
    path = f"{RESPONSES}/resp_1"
    engines[1].script = plain(b'{"detail":"Method Not Allowed"}', "405 Method Not Allowed")
    assert send(server, "DELETE", path)[::2] == (405, b'{"detail":"Method Not Allowed"}')
    # A response that the engine did not delete is still found.
    engines[1].pages[path] = plain(b"{}")
    assert send(server, "GET", path)[1]["x-kvrouter-worker"] == "w1"
    engines[1].script = plain(b"{}")
    assert send(server, "DELETE", path)[0] == HTTPStatus.OK
    engines[0].pages[path] = plain(b'{"unknown":true}', "404 Not Found")
    assert send(server, "GET", path)[::2] == (404, b'{"unknown":true}')


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", f"{RESPONSES}/resp_1", "GET, DELETE"),
        ("HEAD", f"{RESPONSES}/resp_1", "GET, DELETE"),
        ("GET", f"{RESPONSES}/resp_1/cancel", "POST"),
        ("DELETE", f"{RESPONSES}/resp_1/input_items", "GET"),
    ],
)
def test_other_methods_are_refused(server: ProxyServer, method: str, path: str, allowed: str) -> None:
    status, headers, _ = send(server, method, path)
    assert (status, headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/", "/../health", "/%2e%2e", "/a%20b", "/a%2fcancel/x", "/" + "x" * 129, "/%c3%a9"])
def test_what_cannot_be_an_id_reaches_no_engine(server: ProxyServer, engines: list[ScriptedEngine], path: str) -> None:
    assert send(server, "GET", RESPONSES + path)[0] == 404
    assert not engines[0].looked and not engines[1].looked


async def broken_off(asked: Asked, wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + ANSWER)
    wire.reset()


EVENTS = [
    b": ping\r\n\r\n",
    b'event: response.created\r\ndata: {"response":{"id":"resp',
    b'_1","output":[]},"type":"response.created"}\r\n\r\n',
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_other",' + USAGE + b"}}\n\n",
]


@pytest.mark.parametrize(
    ("answer", "body", "owner"),
    [
        (plain(ANSWER), BODY, "w1"),
        (plain(b'{"object":"response","output":[{"id":"msg_1"}],"id":"resp_1"}'), BODY, "w1"),
        (stream(EVENTS), BODY | {"stream": True}, "w1"),
        (broken_off, BODY, "w1"),
        # Not remembered: the turn goes to the first worker.
        (plain(ANSWER), BODY | {"store": False}, "w0"),
        (plain(ANSWER, "400 Bad Request"), BODY, "w0"),
        (plain(ANSWER, headers=["content-encoding: x"]), BODY, "w0"),
        (plain(b'{"output":"' + b"x" * MAX_HEAD_BYTES + b'","id":"resp_1"}'), BODY, "w0"),
        (plain(b'{"output":[{"id":"resp_1"}]}'), BODY, "w0"),
    ],
)
def test_the_owner_is_the_worker_whose_answer_begins_with_the_id(
    server: ProxyServer, engines: list[ScriptedEngine], answer: object, body: dict[str, object], owner: str
) -> None:
    engines[1].script = answer  # type: ignore[assignment]
    try:
        server.post(RESPONSES, body, {"x-kvrouter-worker": "w1"})
    except OSError as error:
        assert answer is broken_off, error
    except Exception as error:
        assert type(error).__name__ == "IncompleteRead", error
    engines[1].script = plain(b"{}")
    assert server.post(RESPONSES, TURN)[1]["x-kvrouter-worker"] == owner


def test_a_turn_counts_the_tokens_of_the_conversation(server: ProxyServer) -> None:
    make(server)
    server.post(RESPONSES, TURN)
    request = server.placer.requests[-1]
    assert (request.is_owned, request.conversation_tokens) == (True, 25)
    server.post(RESPONSES, BODY)
    assert not server.placer.requests[-1].is_owned


def test_a_turn_goes_to_no_other_worker(engines: list[ScriptedEngine]) -> None:
    with proxying(worker("w0", engines[0].url), worker("w1", engines[1].url)) as server:
        make(server)
        engines[1].kill()
        for _ in range(2):
            status, headers, raw = server.post(RESPONSES, TURN)
            assert (status, json.loads(raw)["error"]["code"]) == (404, "response_owner_gone")
            assert headers["x-kvrouter-retried"] == "w1 refused"
        status, _, raw = send(server, "GET", f"{RESPONSES}/resp_1")
        assert (status, json.loads(raw)["error"]["code"]) == (404, "response_owner_gone")
        assert not engines[0].asked


@pytest.mark.parametrize("value", [b'"\\ud800"', b'"\xed\xa0\x80"', b"NaN", b"1e999", b"1" * 400, b"[1]", b"{}", b"1"])
@pytest.mark.parametrize("field", [b"previous_response_id", b"request_id"])
def test_an_id_that_is_no_readable_text_is_left_to_the_engine(
    server: ProxyServer, engines: list[ScriptedEngine], field: bytes, value: bytes
) -> None:
    body = b'{"model":"m","input":"a","%b":%b}' % (field, value)
    assert server.post(RESPONSES, body)[0] == HTTPStatus.OK
    (asked,) = [asked for engine in engines for asked in engine.asked]
    assert asked.body == body


def of_alice(server: ProxyServer) -> None:
    """Remember a response of another client's key at w1."""
    server.on_loop(lambda: server.proxy.responses.owners.made("resp_a", WorkerKey("m", "w1"), "alice"))


def test_a_client_without_a_key_overwrites_no_response_of_a_key(
    server: ProxyServer, engines: list[ScriptedEngine]
) -> None:
    of_alice(server)
    # Clients of a gateway have no key, whether other clients need one or not.
    body = json.dumps(BODY | {"request_id": "resp_a"}).encode()
    with pytest.raises(Conflict) as error:
        Door(server).pick(body, RESPONSES)
    assert error.value.code == "response_id_taken"
    for raw in (body, body.decode().encode("utf-16"), body.replace(b"request_id", rb"request\u005fid")):
        status, _, answer = server.post(RESPONSES, raw)
        assert (status, code(answer)) == (409, "response_id_taken")
    assert not engines[0].asked and not engines[1].asked
    own = json.dumps(BODY | {"request_id": "resp_b"}).encode()
    assert server.post(RESPONSES, own)[0] == HTTPStatus.OK
    observer = Door(server).pick(own, RESPONSES).observer
    assert observer is not None
    observer.close()


@pytest.mark.parametrize("field", ["previous_response_id", "request_id"])
@pytest.mark.parametrize("name", ["%s", "\\u00%02x%s"])
def test_an_id_of_a_response_is_sent_once(
    server: ProxyServer, engines: list[ScriptedEngine], field: str, name: str
) -> None:
    of_alice(server)
    hidden = name % (field if name == "%s" else (ord(field[0]), field[1:]))
    for first, last in ((hidden, field), (field, hidden)):
        raw = f'{{"model":"m","input":"a","{first}":"resp_a","{last}":"resp_b"}}'.encode()
        with pytest.raises(BadQuestion, match="send it once"):
            Door(server).pick(raw, RESPONSES)
        assert code(server.post(RESPONSES, raw)[2]) == "malformed_body"
    assert not engines[0].asked and not engines[1].asked
    # Other fields, and other paths, are the engine's business.
    twice = (
        f'{{"user":"a","user":"b","{field}":"resp_b","model":"m","input":"a","prompt":"a","{field}":"resp_c"}}'.encode()
    )
    assert server.post("/v1/completions", twice)[0] == HTTPStatus.OK
    assert server.post(RESPONSES, b'{"model":"m","input":"a","user":"a","user":"b"}')[0] == HTTPStatus.OK
