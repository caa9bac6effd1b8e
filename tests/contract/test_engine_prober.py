# SPDX-License-Identifier: Apache-2.0
"""The prober at any server at a worker's URL: it reports why it learns nothing, and raises no exception."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import time
from pathlib import Path

import aiohttp
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.discovery.engine_prober import EngineProber, ProbeRequest
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_answers import EngineAnswers
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import REGISTER
from tests.support.certificates import Authority

WHOLE = ProbeRequest(model=True, streams=True)
MODELS = b'{"data": [{"id": "m"}]}'


def ok(body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), b"connection: close", *headers]
    return b"\r\n".join([*lines, b"", body])


def status(code: int, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 %d X" % code, b"content-length: 0", b"connection: close", *headers, b"", b""])


def models(name: str) -> bytes:
    return ok(json.dumps({"data": [{"id": name}]}).encode())


def probed(answers: dict[str, bytes], what: ProbeRequest = WHOLE, rest: bytes | None = None) -> EngineAnswers:
    """Return the prober's findings at a server that sends these bytes by path.

    The server sends `rest`, or 404, on all other paths.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        writer.write(answers.get(path, status(404) if rest is None else rest))
        await writer.drain()
        writer.close()

    async def run() -> EngineAnswers:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await ask(f"http://127.0.0.1:{port_of(server)}", what)

    return asyncio.run(run())


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def ask(url: str, what: ProbeRequest = WHOLE) -> EngineAnswers:
    async with aiohttp.ClientSession() as session:
        key = EngineKey(None, AllowList())
        prober = EngineProber(session, key=key, clock=time.monotonic, rng=random.Random(0), changed=lambda: None)
        return await prober.ask(url, what)


@pytest.mark.parametrize("code", [404, 405])
@pytest.mark.parametrize("what", [WHOLE, ProbeRequest(model=True), ProbeRequest(streams=True)])
def test_an_address_without_any_engine_says_to_write_the_engines_own(code: int, what: ProbeRequest) -> None:
    answers = probed({}, what, status(code))
    assert f"/v1/models answers {code}): write http://HOST:PORT of the engine itself" in answers.problem
    assert answers.problem.count("no engine answers there") == 1
    # The server may be a gateway whose engine is away, so the known event sources stay.
    assert answers == EngineAnswers(problem=answers.problem, fix=answers.fix) and answers.fix in answers.problem


async def test_an_engine_that_does_not_answer_did_not_describe_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with aiohttp.ClientSession() as session:
        key = EngineKey(None, AllowList())
        prober = EngineProber(session, key=key, clock=time.monotonic, rng=random.Random(0), changed=lambda: None)
        prober.want({"http://127.0.0.1:9": ProbeRequest(model=True)})
        await prober.look()
    (record,) = [record for record in caplog.records if record.name.endswith("engine_prober")]
    assert record.message == "engine described itself in part or not at all"
    assert "http://127.0.0.1:9 cannot be reached: Connection refused)" in record.__dict__["problem"]


@pytest.mark.parametrize("listed_key", [None, "own"])
async def test_a_client_does_not_name_the_key_of_an_engine_that_a_source_shows(listed_key: str | None) -> None:
    received: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        received.extend(line for line in head if line.startswith("authorization:"))
        writer.write(ok(MODELS))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port_of(server)}"
        # The engine is not registered by its source yet, and a client has registered it already.
        clients = Registration(WorkerKey("m", "w1", 0), url=url, source=REGISTER, engine_key="other")
        key = EngineKey("common", AllowList(), lambda: registrations)
        registrations = [clients]
        key.take("common", {"own": "second", "other": "third"})
        prober = EngineProber(session, key=key, clock=time.monotonic, rng=random.Random(0), changed=lambda: None)
        prober.want({url: ProbeRequest(model=True, engine_key=listed_key)})
        await prober.look()
        await prober.ask(url, ProbeRequest(model=True, engine_key="other"))
        assert received == [f"authorization: bearer {'common' if listed_key is None else 'second'}"] * 2


def test_an_engine_that_cannot_say_where_its_events_are_is_one() -> None:
    for answers in ({"/v1/models": ok(MODELS)}, {"/v1/models": status(401)}):
        findings = probed(answers, ProbeRequest(streams=True))
        assert findings.silent and findings.streams == {} and "write events=" in findings.problem
    assert (probed({"/v1/models": ok(MODELS)})).model == "m"


@pytest.mark.parametrize("code", [401, 403])
def test_an_engine_that_wants_a_key_is_to_be_given_one(code: int) -> None:
    assert "--worker-api-key" in (probed({}, rest=status(code))).problem


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        status(101, b"upgrade: h2c"),
        status(204),
        status(302, b"location: http://[::1"),
        status(500),
        status(999),
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nab",
        b"HTTP/1.1 200 OK\r\n\xff\xfe: \x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
        ok(b"none", b"content-encoding: gzip"),
        ok(b"none", b"content-encoding: br"),
        ok(b"{}", b"set-cookie: \xff=\x01; expires=x", b"content-type: \xff/\xff; charset=\x01"),
        ok(b'{"data":' + b"[" * 100_000),
        ok(b'{"x":' + b"[" * 100_000),
        ok(b'{"data": [{"id": "\xff"}]}'),
        ok(b'{"data": [{"id": "\\ud800"}]}'),
        ok(b" " * (1024**2 + 1)),
        models(""),
        models(" "),
        models("x" * 513),
    ],
)
def test_an_invalid_answer_is_a_reason(answer: bytes) -> None:
    findings = probed({}, rest=answer)
    assert findings.model is None and "model is not known" in findings.problem


@pytest.mark.parametrize(
    "info",
    [
        {"endpoint_port_base": -5, "publisher": "zmq", "dp_size": -3},
        {"endpoint_port_base": 10**20, "publisher": "zmq", "dp_size": 2},
        {"endpoint_port_base": 5, "publisher": "zmq", "dp_size": 10**18, "endpoint_host": "] x["},
    ],
)
def test_impossible_streams_are_ignored(info: dict[str, object]) -> None:
    body = json.dumps({"disable_radix_cache": False, "kv_events": info}).encode()
    findings = probed({"/v1/models": ok(MODELS), "/server_info": ok(body)})
    assert findings.model == "m" and not findings.streams and findings.problem


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "http://[::1]:1",
        "http://[fe80::1%25lo]:1",
        "http://a..b:80",
        f"http://{'a' * 300}:80",
        "http://1.2.3.4.5:80",
        "http://xn--a.invalid:80",
    ],
)
def test_an_address_without_an_engine_is_a_reason(url: str) -> None:
    assert "model is not known" in asyncio.run(ask(url)).problem


def test_a_server_that_hangs_up_on_tls_is_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def run() -> EngineAnswers:
            hang_up = asyncio.create_task(asyncio.to_thread(lambda: listener.accept()[0].close()))
            findings = await ask(f"https://127.0.0.1:{listener.getsockname()[1]}", ProbeRequest(model=True))
            await hang_up
            return findings

        assert "model is not known" in asyncio.run(run()).problem


def test_an_untrusted_certificate_is_a_reason(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "nobody").issue("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def run() -> EngineAnswers:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
            return await ask(f"https://127.0.0.1:{port_of(server)}")

    assert "cannot be reached" in asyncio.run(run()).problem
