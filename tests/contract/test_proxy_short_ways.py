# SPDX-License-Identifier: Apache-2.0
"""The proxy's fast paths past the general parsers change nothing.

The same random exchanges, with the fast paths and without, give the same bytes, the same counts and the same load. Real
sockets.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import random
import re
from typing import Any

import httptools
import msgspec
import pytest

from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.serve.api.http import http_connection
from kvrouter.router.serve.api.http.plain_head import plain_head
from tests.contract.proxy_support import CHAT, COMPLETIONS, fleet, until
from tests.support.examples import examples
from tests.support.scripted_engine import Asked, Wire, chunk

USAGE = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}}'
EVENTS = [b"data: {}\n\n", b"data: \xff\x00\n\n", b"data: " + USAGE + b"\n\n", b"data: [DONE]\n\n"]
# Headers that differ from run to run.
OF_THE_RUN = frozenset({b"date", b"x-kvrouter-selection-id"})
# The ways in which an engine may answer; a breaker counts the bad ones.
GOOD = ("plain", "stream", "cut stream", "interim", "no length", "closes", "404", "empty")
BAD = ("503", "500", "reset", "short", "broken stream", "no http")


async def answer(asked: Asked, wire: Wire) -> None:
    """Answer as the request's body says."""
    how = json.loads(asked.body)["how"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(USAGE)
    whole = b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
    stream_head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    if how == "plain":
        await wire.send(head + b"X-Request-Id: theirs\r\n\r\n" + USAGE)
    elif how == "stream":
        await wire.send(stream_head)
        for event in EVENTS:
            await asyncio.sleep(0.001)
            await wire.send(chunk(event))
        await wire.send(b"0\r\n\r\n")
    elif how == "cut stream":
        at = json.loads(asked.body)["at"] % len(whole)
        await wire.send(stream_head + whole[:at])
        await asyncio.sleep(0.002)
        await wire.send(whole[at:])
    elif how == "interim":
        await wire.send(b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n", head + b"\r\n" + USAGE)
    elif how == "no length":
        await wire.send(b"HTTP/1.1 200 OK\r\nx: 1\r\n\r\n" + USAGE)
        wire.close()
    elif how == "closes":
        await wire.send(head + b"connection: close\r\n\r\n" + USAGE)
        wire.close()
    elif how in ("404", "500", "503"):
        await wire.send(b"HTTP/1.1 %b What\r\ncontent-length: 2\r\n\r\nno" % how.encode())
    elif how == "empty":
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    elif how == "reset":
        wire.reset()
    elif how == "short":
        await wire.send(head + b"\r\n" + USAGE[:9])
        wire.close()
    elif how == "broken stream":
        await wire.send(stream_head + chunk(EVENTS[0]) + b"zz\r\n")
    elif how == "no http":
        await wire.send(b"hello\r\n\r\n")
    else:
        await wire.gone.wait()


class Step(msgspec.Struct):
    """One connection of a client: its requests, how they are cut, and whether it hangs up before the answer."""

    requests: list[bytes]
    pieces: int
    hangs_up: bool


def some_request(draw: random.Random, how: str, *, close: bool) -> bytes:
    prompt = draw.choice(([1, 2, 3], [1, 2, 3], "text", 5, {"no": "prompt"}))
    body = json.dumps(
        {"model": draw.choice(("m",) * 9 + ("x",)), "prompt": prompt, "how": how, "at": draw.randrange(999)}
    )
    raw = body.encode()
    lines = [
        f"POST {draw.choice((CHAT, COMPLETIONS, COMPLETIONS + '?x=1'))} HTTP/1.1",
        "Host: localhost",
        "x-request-id: mine",
    ]
    lines += draw.sample(
        ["Accept: */*", "X-More: a b", "x-more: c", "Authorization: Bearer k", "x-kvrouter-worker: w1"], 2
    )
    if draw.random() < 0.2:
        lines.append("transfer-encoding: chunked")
        raw = chunk(raw) + b"0\r\n\r\n"
    else:
        lines.append(f"content-length: {len(raw)}")
    if close:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + raw


def some_step(draw: random.Random) -> Step:
    if draw.random() < 0.1:
        return Step([some_request(draw, "hang", close=False)], 1, hangs_up=True)
    hows = [draw.choice(GOOD if draw.random() < 0.7 else BAD) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    requests = [some_request(draw, how, close=i == len(hows) - 1) for i, how in enumerate(hows)]
    return Step(requests, draw.choice((1, 1, 2, 4)), hangs_up=False)


class Answers:
    """The answers in a client's bytes, without the limits of chunks, which depend on the sockets."""

    def __init__(self, data: bytes) -> None:
        self.found: list[Any] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in OF_THE_RUN:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.found.append((self._parser.get_status_code(), self._headers, "cut"))

    def on_body(self, piece: bytes) -> None:
        self._body += piece
        self.found[-1] = (*self.found[-1][:2], b"cut: " + self._body)

    def on_message_complete(self) -> None:
        self.found[-1] = (*self.found[-1][:2], self._body)


def exchanged(router: Any, step: Step, draw: random.Random) -> list[Any]:
    """Send the requests of a step, and return all answers that the client gets."""
    data = b"".join(step.requests)
    edges = [0, *sorted(draw.randrange(1, len(data)) for _ in range(step.pieces - 1)), len(data)]
    with router.connect() as client:
        for start, end in itertools.pairwise(edges):
            client.sendall(data[start:end])
        whole = b""
        try:
            while piece := client.recv(65_536):
                whole += piece
        except ConnectionResetError:
            # The router did not read the bytes behind the last request, so its close became a reset.
            pass
        return Answers(whole).found


def asked_whole(router: Any, worker: str) -> int:
    """Send a plain request to this worker in one piece, and return its status."""
    raw = json.dumps({"model": "m", "how": "plain"}).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", f"x-kvrouter-worker: {worker}", "x-request-id: between"]
    with router.connect() as client:
        client.sendall("\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        answer.read()
        return answer.status


def counts(router: Any) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for metric in router.registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


def played(seed: int, steps: int) -> list[Any]:
    """Play random steps; return the clients' answers, and the counts and loads at the end."""
    draw = random.Random(seed)
    results: list[Any] = []
    with fleet(answer, answer) as (router, *engines):
        for _ in range(steps):
            step = some_step(draw)
            if step.hangs_up:
                before = sum(engine.given_up for engine in engines)
                with router.connect() as client:
                    count = sum(len(engine.asked) for engine in engines)
                    client.sendall(step.requests[0])
                    if b'"x"' not in step.requests[0]:
                        until(lambda: sum(len(engine.asked) for engine in engines) > count, "an engine has it")  # noqa: B023
                if b'"x"' not in step.requests[0]:
                    until(lambda: sum(engine.given_up for engine in engines) > before, "it is given up")  # noqa: B023
            else:
                results.append((step, exchanged(router, step, draw)))
            until(lambda: router.sample("proxy_open_requests") == 0, "all are over")
            for name in ("w0", "w1"):
                # A good answer makes a breaker forget failures.
                assert asked_whole(router, name) == 200
        until(lambda: router.sample("proxy_open_requests") == 0, "all are over")
        results.append(counts(router))
        results.append([(placed.worker, placed.told, placed.output_tokens) for placed in router.placer.placed])
        results.append([[(count.target, count.headers, count.body) for count in engine.asked] for engine in engines])
    return results


@pytest.mark.property
def test_the_short_ways_give_the_same_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = examples(200)
    with_them = played(20263, steps)
    taken: list[int] = []
    short = plain_head

    def none_is_plain(*arguments: Any) -> None:
        taken.append(short(*arguments) is not None)

    monkeypatch.setattr(http_connection, "plain_head", none_is_plain)
    monkeypatch.setattr(Connection, "_take_plain", lambda self, data: False)
    without = played(20263, steps)
    for result, other_result in zip(with_them, without, strict=True):
        hosts = re.compile(r"127\.0\.0\.1:\d+")
        assert hosts.sub("", repr(result)) == hosts.sub("", repr(other_result))
    # Many requests are plain, and many are not.
    assert len(taken) / 5 < sum(taken) < len(taken) * 19 / 20
