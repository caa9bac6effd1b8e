# SPDX-License-Identifier: Apache-2.0
"""Connections in memory between two asyncio protocols, with latency, partitions and resets.

Bytes arrive in the order in which they were sent, whatever order an event loop gives to timers of one moment. What is
sent into a partition arrives after it, as TCP sends again, or never if the connection broke meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

# The signs that one end sends the other besides bytes.
_CLOSED, _RESET = object(), object()


class Wire:
    """One connection. `near` and `far` are its two ends; the protocol of `far` is a server's."""

    def __init__(
        self,
        near: asyncio.BaseProtocol,
        far: asyncio.BaseProtocol,
        *,
        latency: Callable[[], float],
        rng: random.Random,
        name: str = "",
    ) -> None:
        """Connect two protocols.

        Args:
            near: The client's protocol.
            far: The server's protocol.
            latency: Returns the seconds that the next bytes take.
            rng: Decides where bytes are cut in two, and what still arrives after a partition.
            name: The client.
        """
        self.name = name
        self.latency = latency
        self.rng = rng
        self.is_cut = False
        self._is_gone = False
        self.near, self.far = End(self, near), End(self, far)
        self.near.peer, self.far.peer = self.far, self.near

    def start(self) -> None:
        """Call both protocols' `connection_made`."""
        for end in (self.far, self.near):
            end.get_protocol().connection_made(end)

    def cut(self) -> None:
        """Let nothing pass, in both directions, until `mend`."""
        self.is_cut = True

    def mend(self) -> None:
        """Let pass what was held."""
        if self._is_gone:
            return
        self.is_cut = False
        for end in (self.near, self.far):
            end.arrive()

    def vanish(self) -> None:
        """Let nothing pass ever again, as if the server's machine had lost its power."""
        self.is_cut = self._is_gone = True

    @property
    def is_over(self) -> bool:
        """Whether nothing can come of this wire any longer."""
        return self.near.is_lost and (self.far.is_lost or self._is_gone)


class End(asyncio.Transport):
    """One end of a wire: the transport of its protocol."""

    peer: End

    def __init__(self, wire: Wire, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._wire = wire
        self._protocol = protocol
        # The data of the other end, with the time of arrival, and how much of it has arrived.
        self._incoming: deque[tuple[float, Any]] = deque()
        self._arrived = 0
        self._is_paused = False
        self._is_closing = False
        self.is_lost = False

    # -- asyncio's transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        asyncio.get_running_loop().call_soon(self.arrive)

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        data = bytes(data)
        # A request may reach the server in two parts, with other clients' requests between them.
        if len(data) > 1 and self._wire.rng.random() < SPLIT_SHARE:
            cut = self._wire.rng.randrange(1, len(data))
            self.peer.expect(data[:cut])
            data = data[cut:]
        self.peer.expect(data)

    def close(self) -> None:
        self._end(_CLOSED)

    def abort(self) -> None:
        self._end(_RESET)

    def _end(self, how: object) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.peer.expect(how)
            asyncio.get_running_loop().call_soon(self._lose, None)

    # -- the other end

    def expect(self, what: Any) -> None:
        """Receive `what` after the wire's latency, behind all that was sent before."""
        if self._is_closing:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + self._wire.latency()
        if self._incoming:
            at = max(at, self._incoming[-1][0])
        self._incoming.append((at, what))
        loop.call_at(at, self._count_arrival)

    def _count_arrival(self) -> None:
        self._arrived += 1
        self.arrive()

    def arrive(self) -> None:
        """Hand out what has arrived by now."""
        while self._arrived and not self._wire.is_cut and not self._is_paused and not self._is_closing:
            self._arrived -= 1
            _, what = self._incoming.popleft()
            if what is _CLOSED:
                self._is_closing = True
                self._protocol.eof_received()  # type: ignore[attr-defined]
                self._lose(None)
            elif what is _RESET:
                self._is_closing = True
                self._lose(ConnectionResetError(104, "Connection reset by peer"))
            else:
                self._protocol.data_received(what)  # type: ignore[attr-defined]

    def _lose(self, reason: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._protocol.connection_lost(reason)


# The share of writes that arrive in two parts.
SPLIT_SHARE = 0.05
