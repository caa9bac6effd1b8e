# SPDX-License-Identifier: Apache-2.0
"""Byte streams over the simulated network, for programs on the virtual loop: asyncio's transports without sockets."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.network import End, Host

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import Process, VirtualLoop


class _Descriptor:
    """A socket as programs see it: a descriptor on which nothing ever arrives, as all bytes go another way."""

    _pair = socket.socketpair()

    def fileno(self) -> int:
        return self._pair[0].fileno()

    def setsockopt(self, *_: object) -> None:
        """Do nothing."""


class TcpTransport(asyncio.Transport):
    """The transport of a connection, on the side of a process."""

    def __init__(
        self, end: End, process: Process, protocol: asyncio.BaseProtocol | None, peer: tuple[str, int]
    ) -> None:
        """Take over one end of a connection; without a protocol, `begin` brings it."""
        super().__init__({"peername": peer, "socket": _Descriptor()})
        self._end, self._process, self._protocol = end, process, protocol
        self._inbox: deque[bytes | Exception | None] = deque()
        self._closing = False
        self._paused = False
        end.on_data = self._arrive
        end.on_closed = self._arrive_end

    def _arrive(self, data: bytes) -> None:
        self._inbox.append(data)
        self._process.call_soon(self._take)

    def _arrive_end(self, error: Exception | None) -> None:
        self._inbox.append(error)
        self._process.call_soon(self._take)

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Bring the protocol, which takes what has arrived meanwhile."""
        self._protocol = protocol
        protocol.connection_made(self)
        for _ in self._inbox:
            self._process.call_soon(self._take)

    def _take(self) -> None:
        if self._closing or self._paused or not self._inbox or self._protocol is None:
            return
        data = self._inbox.popleft()
        if isinstance(data, bytes):
            self._protocol.data_received(data)  # type: ignore[attr-defined]
        elif data is None and self._protocol.eof_received():  # type: ignore[attr-defined]
            return
        else:
            self._lose(data)

    def _lose(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            self._process.call_soon(self.get_protocol().connection_lost, error)

    # -- asyncio's interface

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def write(self, data: Any) -> None:
        if not self._closing:
            self._end.send(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._end.close()
        self._lose(None)

    abort = close

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        for _ in self._inbox:
            self._process.call_soon(self._take)

    def is_reading(self) -> bool:
        return not self._paused

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: every write is taken at once."""

    def can_write_eof(self) -> bool:
        return False


async def connect_tcp(loop: VirtualLoop, factory: Callable[[], Any], host: str, port: int) -> tuple[TcpTransport, Any]:
    """Connect from the present process. Raises ConnectionRefusedError; waits for as long as nobody answers."""
    from tests.simulation.virtual_loop import PROCESS

    process = PROCESS.get()
    assert process is not None
    future: asyncio.Future[End] = loop.create_future()
    settled = False

    def settle(end: End | None) -> None:
        nonlocal settled
        settled = True

        def resume() -> None:
            if future.done():
                if end is not None:
                    end.close()
            elif end is None:
                future.set_exception(ConnectionRefusedError(111, "Connection refused"))
            else:
                future.set_result(end)

        process.call_soon(resume)

    network = loop.network
    network.dial(
        network.host_of(process),
        host,
        int(port),
        settle,
        lambda: settle(None),
        lambda: not settled and not future.done(),
    )
    end = await future
    protocol = factory()
    transport = TcpTransport(end, process, protocol, (host, int(port)))
    protocol.connection_made(transport)
    return transport, protocol


def listen_tcp(host: Host, port: int, process: Process, factory: Callable[[], Any], token: str) -> None:
    """Serve byte streams in the process of the router with this token."""

    def accept(end: End) -> None:
        end.token = token
        transport = TcpTransport(end, process, None, (end.peer.host.address, end.number))
        process.call_soon(lambda: transport.begin(factory()))

    host.listeners[port] = accept


def serve_tcp(host: Host, port: int, session: Callable[[End], Callable[[bytes], None]]) -> None:
    """Serve byte streams in system events; `session` returns what takes a connection's bytes."""

    def accept(end: End) -> None:
        end.on_data = session(end)

    host.listeners[port] = accept
