# SPDX-License-Identifier: Apache-2.0
"""A short look at an endpoint, with real sockets of libzmq and of other programs.

The look leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq

from kvrouter.router.app.diagnosis import endpoint_probe
from kvrouter.router.app.diagnosis.endpoint_probe import EndpointAnswer, probe_endpoint, probe_endpoints, probe_engines
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store.server_settings import server_settings
from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import FakeEngine, prompt, stored
from tests.support.ports import free_port
from tests.support.store_server import StoreServer


def look(endpoint: str) -> EndpointAnswer:
    return asyncio.run(probe_endpoint(endpoint))


@contextmanager
def bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> Iterator[str]:
    with context.socket(kind) as listening:
        listening.bind(endpoint)
        yield listening.getsockopt_string(zmq.LAST_ENDPOINT)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("kind", "name"), [(zmq.PUB, "PUB"), (zmq.XPUB, "XPUB"), (zmq.ROUTER, "ROUTER"), (zmq.REP, "REP")]
)
def test_a_socket_says_its_type(context: zmq.Context[zmq.Socket[bytes]], kind: int, name: str, tmp_path: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/socket"):
        with bound(context, kind, endpoint) as at:
            assert look(at) == EndpointAnswer(is_zmq=True, socket=name)


def test_an_encrypted_socket_is_one_whose_type_is_not_known(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with context.socket(zmq.ROUTER) as listening:
        listening.curve_server = True
        listening.curve_secretkey = zmq.curve_keypair()[1]
        listening.bind("tcp://127.0.0.1:*")
        assert look(listening.getsockopt_string(zmq.LAST_ENDPOINT)) == EndpointAnswer(is_zmq=True)


def test_closed_ports_and_wrong_addresses_are_named(tmp_path: Path) -> None:
    assert look(f"tcp://127.0.0.1:{free_port()}") == EndpointAnswer("Connection refused")
    assert look(f"ipc://{tmp_path}/none") == EndpointAnswer("No such file or directory")
    assert look("tcp://127.0.0.1:port").problem
    assert look("tcp://name.invalid:1").problem


def test_another_program_is_no_zmq() -> None:
    http = EngineHttp()
    try:
        assert look(f"tcp://127.0.0.1:{http.port}") == EndpointAnswer()
    finally:
        http.stop()


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff", endpoint_probe.GREETING[:40], endpoint_probe.GREETING, endpoint_probe.GREETING + b"\x04\xff\x05REA"],
    ids=["nothing", "a byte", "half a greeting", "a greeting", "half a command"],
)
def test_a_silent_or_closing_server_is_not_waited_for(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_probe, "TIMEOUT_S", 0.2)
    is_zmq = len(said) >= len(endpoint_probe.SIGNATURE)
    for hangs_up in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as server:
            held: list[socket.socket] = []

            def serve(server: socket.socket = server, held: list[socket.socket] = held, ends: bool = hangs_up) -> None:
                connection, _ = server.accept()
                connection.sendall(said)
                if ends:
                    # Unread bytes would turn the close into a reset.
                    connection.recv(len(endpoint_probe.GREETING))
                    connection.close()
                held.append(connection)

            thread = threading.Thread(target=serve)
            thread.start()
            assert look(f"tcp://127.0.0.1:{server.getsockname()[1]}") == EndpointAnswer(is_zmq=is_zmq)
            thread.join()
            for connection in held:
                connection.close()


def test_looks_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_probe, "DEADLINE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert asyncio.run(probe_endpoints([f"tcp://127.0.0.1:{silent.getsockname()[1]}"])) == {}


def test_a_look_disturbs_no_publisher(engine: FakeEngine) -> None:
    for _ in range(3):
        assert look(engine.endpoint) == EndpointAnswer(is_zmq=True, socket="XPUB")
        assert engine.replay_endpoint is not None
        assert look(engine.replay_endpoint) == EndpointAnswer(is_zmq=True, socket="ROUTER")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.connect(engine.endpoint)
        engine.wait_subscribed()
        engine.publish(stored(prompt(1), 0, 4))
        assert reader.poll(10_000)
    context.destroy(linger=0)


def test_engines_say_the_time_and_closed_ports_are_named() -> None:
    engine = EngineHttp()
    closed = f"http://127.0.0.1:{free_port()}"

    async def ask() -> tuple[dict[str, str], dict[str, float]]:
        async with aiohttp.ClientSession() as http:
            return await probe_engines(http, [engine.url, closed], lambda: 0.0)

    try:
        problems, ahead = asyncio.run(ask())
    finally:
        engine.stop()
    assert problems == {engine.url: "", closed: "Connection refused"}
    assert list(ahead) == [engine.url] and ahead[engine.url] > 1e9


def test_the_settings_of_redis_and_its_refusals_are_reported(tmp_path: Path) -> None:
    with StoreServer(tmp_path, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru") as server:

        async def settings(url: str) -> object:
            servers = await Servers.open(url)
            try:
                return await server_settings(servers)
            finally:
                await servers.close()

        (server_report,) = asyncio.run(settings(server.url)).values()  # type: ignore[attr-defined]
        assert (server_report.policy, server_report.limit_bytes, server_report.has_maxmemory) == (
            "allkeys-lru",
            50 * 1024**2,
            True,
        )
        assert (server_report.appends, server_report.save, server_report.failing, server_report.refused) == (
            False,
            "",
            "",
            (),
        )
        assert 0 < server_report.used_bytes < server_report.limit_bytes and server_report.time_s > 1e9
        server.client.execute_command(
            "ACL", "SETUSER", "router", "on", ">secret", "~kvr:*", "-@all", "+info", "+select"
        )
        server.client.config_set("maxmemory", "0")
        url = f"redis://router:secret@127.0.0.1:{server.port}/0"
        (server_report,) = asyncio.run(settings(url)).values()  # type: ignore[attr-defined]
        assert server_report.refused == ("CONFIG", "TIME")
        assert (server_report.appends, server_report.save, server_report.time_s) == (False, None, None)
        assert server_report.limit_bytes > 2**30 and not server_report.has_maxmemory

        async def ask_a_stopped_one() -> None:
            servers = await Servers.open(server.url)
            server.stop()
            try:
                with pytest.raises(StoreError):
                    await server_settings(servers)
            finally:
                server.resume()
                await servers.close()

        asyncio.run(ask_a_stopped_one())
