# SPDX-License-Identifier: Apache-2.0
"""TLS of the HTTP port where it differs from plain connections: handshakes, ends, and bytes that are not TLS.

The sockets are real, on uvloop and on asyncio's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from kvrouter.router.serve.access.certificate import CertificateFiles, read_certificate
from kvrouter.router.serve.api.http import tls as tls_module
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from tests.contract.api_support import TinyCore, build, hit
from tests.contract.served_app import WAIT_S, ServedApp
from tests.support.certificates import Authority, Pair

HOST = "127.0.0.1"
SHORT = HttpLimits(handshake_timeout_s=1.5, head_timeout_s=1.0, send_timeout_s=2.0, max_connections=4)
REQUEST = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
# More bytes than the kernel's buffers and the server's hold.
LARGE_BYTES = 24 * 1024**2


class Server(ServedApp):
    def __init__(
        self,
        pair: Pair,
        loop: Callable[[], asyncio.AbstractEventLoop],
        limits: HttpLimits,
        client_ca: Path | None = None,
    ) -> None:
        context = read_certificate(CertificateFiles(*pair, client_ca=client_ca)).context
        core = TinyCore([hit("w0", 16, 32, 48)])
        super().__init__(build(core), limits, context=context, loop=loop, graceful_s=10)

    def plain(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=WAIT_S)

    def connect(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        return context.wrap_socket(self.plain(), server_hostname=HOST)

    def serves(self, context: ssl.SSLContext) -> bool:
        """Return whether a request that ends its connection is answered with a success."""
        with self.connect(context) as client:
            client.sendall(LAST)
            return received(client).startswith(b"HTTP/1.1 200 ")

    def wait_cuts(self, **wanted: float) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.cuts() != wanted:
            assert time.monotonic() < deadline, self.cuts()
            time.sleep(0.01)

    def wait_idle(self) -> None:
        """Wait until the server holds no connection."""
        deadline = time.monotonic() + WAIT_S
        while self.server.server_state.connections or self.server.server_state.tasks:
            assert time.monotonic() < deadline, self.server.server_state.connections
            time.sleep(0.01)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def server(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Server]:
    instance = Server(pair, request.param, SHORT)
    yield instance
    instance.close()


def received(client: socket.socket) -> bytes:
    whole = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while piece := client.recv(65_536):
            whole += piece
    return whole


def test_a_request_over_tls_is_answered_and_http_1_1_is_agreed_on(server: Server, authority: Authority) -> None:
    context = authority.client()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with server.connect(context) as client:
        assert client.selected_alpn_protocol() == "http/1.1"
        assert client.version() == "TLSv1.3"
        for _ in range(3):
            client.sendall(REQUEST)
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
        # Both requests are in one packet, and the second ends the connection.
        client.sendall(REQUEST + LAST)
        assert received(client).count(b"HTTP/1.1 200 ") == 2
    server.wait_idle()
    assert server.cuts() == {}


def test_versions_before_1_2_are_refused(server: Server, authority: Authority) -> None:
    address = ("-connect", f"{HOST}:{server.port}", "-CAfile", str(authority.file), "-cipher", "ALL:@SECLEVEL=0")
    for version, speaks in (("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
        command = ["openssl", "s_client", *address, version]
        done = subprocess.run(command, input=b"", capture_output=True, timeout=WAIT_S)
        assert (done.returncode == 0) == speaks, done.stderr


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01", REQUEST, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)]
)
def test_a_handshake_that_does_not_come_is_cut_and_counted(server: Server, authority: Authority, sent: bytes) -> None:
    with server.plain() as client:
        client.sendall(sent)
        # The client gets an alert at most, because the key and the errors of HTTP come after the handshake.
        assert len(received(client)) < 20
    server.wait_cuts(handshake=1.0)
    server.wait_idle()
    assert server.serves(authority.client())


def test_a_client_that_hangs_up_within_the_handshake_leaves_nothing(server: Server) -> None:
    for linger in (False, True):
        client = server.plain()
        client.sendall(b"\x16\x03\x01")
        if linger:
            # The close becomes a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    server.wait_cuts(handshake=2.0)
    server.wait_idle()


def test_handshakes_count_as_connections(server: Server, authority: Authority) -> None:
    held = [server.plain() for _ in range(SHORT.max_connections)]
    deadline = time.monotonic() + WAIT_S
    while len(server.server.server_state.connections) < len(held):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with server.plain() as late:
        assert received(late) == b""
    server.wait_cuts(connections=1.0)
    for client in held:
        # Each is cut because its handshake takes too long.
        assert received(client) == b""
        client.close()
    server.wait_cuts(connections=1.0, handshake=float(len(held)))
    assert server.serves(authority.client())


def test_a_slow_head_behind_the_handshake_is_cut(server: Server, authority: Authority) -> None:
    with server.connect(authority.client()) as client:
        client.sendall(b"GET /version HTTP/1.1\r\n")
        assert received(client).startswith(b"HTTP/1.1 408 ")
    server.wait_cuts(head_time=1.0)


def test_an_end_reaches_a_client_that_never_says_that_it_is_done(server: Server, authority: Authority) -> None:
    with server.connect(authority.client()) as client:
        client.sendall(LAST)
        assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
        # The client never sends its own close_notify, but the connection ends anyway, with nothing lost.
        server.wait_idle()
    assert server.cuts() == {}


def test_a_server_that_stops_does_not_wait_for_idle_clients(pair: Pair, authority: Authority) -> None:
    server = Server(pair, uvloop.new_event_loop, SHORT)
    with server.connect(authority.client()) as idle, server.plain():
        idle.sendall(REQUEST)
        assert idle.recv(65_536).startswith(b"HTTP/1.1 200 ")
        # The connection that is within its handshake gets the full time for it.
        begun_s = time.monotonic()
        server.close()
        assert time.monotonic() - begun_s < 8.0


def test_a_stopping_server_serves_clients_within_the_handshake(pair: Pair, authority: Authority) -> None:
    server = Server(pair, uvloop.new_event_loop, HttpLimits())
    client = server.plain()
    deadline = time.monotonic() + WAIT_S
    while not server.server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.end()
    time.sleep(0.5)
    with authority.client().wrap_socket(client, server_hostname=HOST) as secured:
        secured.sendall(REQUEST)
        answer = received(secured)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer
    server.close()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_last_answer_reaches_a_slow_reader_whole(
    pair: Pair, authority: Authority, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    server = Server(pair, loop, SHORT)
    content = bytes(range(256)) * (LARGE_BYTES // 256)
    cold = server.app.cold

    async def large(scope: object, receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": content})  # type: ignore[misc]

    server.app.cold = large  # type: ignore[assignment]
    try:
        with server.connect(authority.client()) as client:
            client.sendall(LAST)
            whole = bytearray()
            # The pauses add up to far more than the limit for a client that reads nothing.
            pause_s = 2.5 * SHORT.send_timeout_s / (LARGE_BYTES / 65_536 / 16)
            while piece := client.recv(65_536):
                whole += piece
                if len(whole) % (1024**2) < len(piece):
                    time.sleep(pause_s)
        assert whole.partition(b"\r\n\r\n")[2] == content
        server.wait_idle()
        assert server.cuts() == {}
    finally:
        server.app.cold = cold
        server.close()


def test_a_client_that_takes_nothing_of_its_last_answer_is_cut(
    pair: Pair, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(pair, uvloop.new_event_loop, SHORT)

    async def large(scope: object, receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": bytes(LARGE_BYTES)})  # type: ignore[misc]

    monkeypatch.setattr(server.app, "cold", large)
    with server.connect(authority.client()) as client:
        client.sendall(LAST)
        assert client.recv(1)
        server.wait_idle()
    server.close()


def test_a_client_without_a_trusted_certificate_is_refused(pair: Pair, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger", "stranger")
    server = Server(pair, uvloop.new_event_loop, SHORT, client_ca=authority.file)
    try:
        assert server.serves(authority.client(authority.issue("client")))
        for refused_pair in (None, stranger.issue("client")):
            # In TLS 1.3 the client learns of the refusal after its own handshake.
            with (
                pytest.raises((ssl.SSLError, ConnectionError)),
                server.connect(authority.client(refused_pair)) as client,
            ):
                client.sendall(LAST)
                assert client.recv(65_536) == b"", "nothing may be answered"
                raise ConnectionResetError
        server.wait_cuts(handshake=2.0)
    finally:
        server.close()


def test_openssl_and_curl_are_served(server: Server, authority: Authority) -> None:
    address = f"{HOST}:{server.port}"
    flags = ["-CAfile", str(authority.file), "-verify_return_error", "-quiet", "-ign_eof"]
    command = ["openssl", "s_client", "-connect", address, *flags]
    done = subprocess.run(command, input=LAST, capture_output=True, timeout=WAIT_S)
    assert done.stdout.startswith(b"HTTP/1.1 200 ")
    curl = ["curl", "-sS", "--cacert", str(authority.file), "-w", " %{http_code} %{http_version}"]
    done = subprocess.run(
        [*curl, f"https://{address}/version", f"https://{address}/health"], capture_output=True, timeout=WAIT_S
    )
    assert done.stdout.count(b" 200 1.1") == 2, done.stderr


def test_a_close_between_two_looks_is_noticed(
    monkeypatch: pytest.MonkeyPatch, server: Server, authority: Authority
) -> None:
    # The test repeats until a client reads its end, and confirms it, between two looks.
    monkeypatch.setattr(tls_module, "CLOSE_LOOK_S", 0.01)
    for _ in range(20):
        assert server.serves(authority.client())
    server.wait_idle()
    assert server.cuts() == {}
