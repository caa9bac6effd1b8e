# SPDX-License-Identifier: Apache-2.0
"""Every span that a request begins is ended, whatever becomes of the request: at the proxy and at the picker."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor

from kvrouter.router.base.common.errors import CutBody, RouterError
from tests.contract.picker_support import Door
from tests.contract.proxy_support import CHAT, COMPLETIONS, OK, ProxyServer, fleet, until
from tests.contract.served_app import request as raw_request
from tests.support.collector import Collector
from tests.support.compression import COMPRESS
from tests.support.scripted_engine import STREAM_HEAD, Asked, Script, Wire, chunk, hang, plain, reset

BODY = {"model": "m", "prompt": [1, 2, 3]}
RAW = json.dumps(BODY).encode()
RESPONSES = "/v1/responses"


class Spans(SpanProcessor):
    """The names of the spans that have begun and not ended, and how many have begun."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.begun = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.begun += 1
        self.open.append(span.name)

    def on_end(self, span: Any) -> None:
        self.open.remove(span.name)


async def cut(asked: Asked, wire: Wire) -> None:
    """Break the answer off after its first bytes."""
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    wire.reset()


async def endless(asked: Asked, wire: Wire) -> None:
    """Send the first event of a stream, and nothing more."""
    await wire.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
    await wire.gone.wait()


@contextmanager
def traced(*scripts: Script, **settings: Any) -> Iterator[tuple[ProxyServer, Spans]]:
    """Run a proxy with these engines, and check at the end that spans have begun and all have ended."""
    with Collector() as collector, fleet(*scripts, otlp_endpoint=collector.url, **settings) as (router, *_):
        spans = Spans()
        router.quality.tracing._provider.add_span_processor(spans)
        yield router, spans
        assert spans.begun
        until(lambda: not spans.open, f"these spans end: {spans.open}")


def hung_up(router: ProxyServer, engine_got: Callable[[], bool]) -> None:
    """Send a request, and reset the connection once the condition holds."""
    with router.connect() as client:
        client.sendall(raw_request(COMPLETIONS, RAW))
        until(engine_got, "the engine has the request")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("script", [OK, reset, cut, plain(b"{}", "503 Gone"), plain(b"no", "400 Bad Request")])
def test_every_end_of_an_engine_ends_the_spans(script: Script) -> None:
    with traced(script) as (router, _):
        assert router.exchange(raw_request(COMPLETIONS, RAW)).startswith(b"HTTP/1.1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, RAW[:-1]),
        (COMPLETIONS, b"[]"),
        (COMPLETIONS, b'{"model": "m", "prompt": 3}'),
        (CHAT, b"{" + b'"a": {' * 10_000),
        (COMPLETIONS, b'{"model": "nope", "prompt": [1]}'),
        (COMPLETIONS, b'{"model": 3}'),
        ("/v1/audio/transcriptions", b"no form"),
        (RESPONSES, b'{"model": "m", "previous_response_id": "resp_1", "input": "a"}'),
        ("/tokenize", b""),
    ],
)
def test_every_refusal_ends_the_spans(path: str, body: bytes) -> None:
    with traced(reset) as (router, _):
        assert router.post(path, body)[0] >= 400


@pytest.mark.parametrize("scripts", [[OK], []])
def test_a_request_about_a_stored_response_ends_its_spans(scripts: list[Script]) -> None:
    with traced(*scripts) as (router, _):
        connection = router.http_client()
        connection.request("GET", f"{RESPONSES}/resp_1")
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == (200 if scripts else 503)


@pytest.mark.parametrize("script", [hang, endless])
def test_a_client_that_hangs_up_ends_the_spans(script: Script) -> None:
    with traced(script) as (router, _):
        hung_up(router, lambda: bool(router.placer.placed))


@contextmanager
def door(**settings: Any) -> Iterator[tuple[Door, Spans]]:
    with traced(OK, **settings) as (router, spans):
        yield Door(router), spans


@pytest.mark.parametrize("ends", ["ends", "close"])
def test_every_answer_to_a_picked_request_ends_the_spans(ends: str) -> None:
    with door() as (picker, spans):
        observer = picker.pick(RAW).observer
        assert observer is not None and spans.open
        observer.begins(200, [], None)
        getattr(observer, ends)()


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "nope"}', b'{"model": "m", "prompt": 3'])
def test_every_refusal_of_the_picker_ends_the_spans(body: bytes) -> None:
    with door() as (picker, _), pytest.raises(RouterError):
        picker.pick(body)


@pytest.mark.parametrize(
    "cut",
    [RAW[:-3], RAW.decode().encode("utf-16")[:-1], b'{"model": "m", "top_p": Na'],
    ids=["json", "utf-16", "nan"],
)
def test_a_body_that_may_go_on_begins_no_span_and_counts_as_nothing(cut: bytes) -> None:
    with door() as (picker, spans):
        with pytest.raises(CutBody):
            picker.pick(cut, may_go_on=True)
        assert not spans.begun
        observer = picker.pick(RAW, may_go_on=True).observer
        assert observer is not None
        observer.close()


# A body of two members ends with each of them, and its JSON with the second.
TWO_MEMBERS = COMPRESS["gzip"](RAW[:10]), COMPRESS["gzip"](RAW[10:])


@pytest.mark.parametrize(
    ("first", "rest"),
    [(COMPRESS["gzip"](RAW)[:-4], COMPRESS["gzip"](RAW)[-4:]), TWO_MEMBERS],
    ids=["in a member", "behind a member"],
)
def test_a_repaired_body_counts_once_as_decoded(first: bytes, rest: bytes) -> None:
    with door() as (picker, _):
        with pytest.raises(CutBody):
            picker.pick(first, may_go_on=True, content_encoding="gzip")
        assert picker.decoded() == {}
        route = picker.pick(first + rest, may_go_on=True, content_encoding="gzip")
        assert route.body == RAW and picker.decoded() == {"decoded": 1}
        assert route.observer is not None
        route.observer.close()


def test_a_body_whose_rest_does_not_come_counts_once_as_broken() -> None:
    first = COMPRESS["gzip"](RAW)[:-4]
    with door() as (picker, _):
        for may_go_on in (True, False):
            with pytest.raises(CutBody):
                picker.pick(first, may_go_on=may_go_on, content_encoding="gzip")
        assert picker.decoded() == {"broken": 1}


def test_a_decoded_body_that_is_refused_counts_once_as_decoded() -> None:
    with door() as (picker, _):
        for may_go_on in (True, False):
            with pytest.raises(RouterError):
                picker.pick(COMPRESS["zstd"](b"[]"), may_go_on=may_go_on, content_encoding="zstd")
        assert picker.decoded() == {"decoded": 2}
