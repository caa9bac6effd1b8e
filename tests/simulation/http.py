# SPDX-License-Identifier: Apache-2.0
"""HTTP on the simulated network: a router's real server, and clients that live in system events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.http.http_connection import connection_factory
from tests.simulation.network import End, Host, Network
from tests.simulation.tcp import listen_tcp

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import Process

PORT = 30_000
# How long a client waits for an answer.
ANSWER_S = 10.0
# The number of the status while there is no answer.
LOST = 0

# Takes the status, the body, and the token of the router that got the request; "" if none did.
Answered = Callable[[int, bytes, str], None]


def serve_http(host: Host, process: Process, api: HttpApi, token: str) -> None:
    """Serve the API of a router's process at PORT of its host."""
    factory, state = connection_factory(api), ServerState()
    listen_tcp(host, PORT, process, lambda: factory(server_state=state), token)


class HttpClient:
    """The clients on one host, with a connection that is kept alive to each router."""

    def __init__(self, network: Network, host: Host) -> None:
        self._network, self._host = network, host
        # Connections without a request.
        self._idle: dict[str, list[_Connection]] = {}

    def send(self, address: str, method: str, path: str, body: bytes, answered: Answered) -> None:
        """Send a request; `answered` is called with LOST if it gets no answer."""
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        idle = self._idle.setdefault(address, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                connection.send(request, answered)
                return
        is_settled = False

        def opened(end: End) -> None:
            nonlocal is_settled
            is_settled = True
            _Connection(self._network, end, idle).send(request, answered)

        def give_up() -> None:
            nonlocal is_settled
            if not is_settled:
                is_settled = True
                answered(LOST, b"", "")

        self._network.dial(self._host, address, PORT, opened, give_up, lambda: not is_settled)
        self._network.loop.after(ANSWER_S, give_up)


class _Connection:
    """A connection with one request at a time."""

    def __init__(self, network: Network, end: End, idle: list[_Connection]) -> None:
        self._network, self._end, self._idle = network, end, idle
        self._unread = b""
        self._answered: Answered | None = None
        self._requests = 0
        end.on_data = self._take
        end.on_closed = lambda error: self._settle(LOST, b"")

    @property
    def is_open(self) -> bool:
        """Whether the connection can take a request, as far as the client knows."""
        return self._end.is_open

    def send(self, request: bytes, answered: Answered) -> None:
        """Send a request."""
        self._answered = answered
        self._requests += 1
        number = self._requests
        self._end.send(request)
        self._network.loop.after(ANSWER_S, lambda: self._give_up(number))

    def _give_up(self, number: int) -> None:
        if self._answered is not None and number == self._requests:
            self._end.close()
            self._settle(LOST, b"")

    def _take(self, data: bytes) -> None:
        self._unread += data
        head, separator, rest = self._unread.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines[1:])}
        length = int(headers[b"content-length"])
        if len(rest) < length:
            return
        self._unread = b""
        if headers.get(b"connection") == b"close":
            self._end.close()
        else:
            self._idle.append(self)
        self._settle(int(lines[0].split(b" ")[1]), rest)

    def _settle(self, status: int, body: bytes) -> None:
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(status, body, self._end.peer.token)
