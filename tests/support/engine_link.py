# SPDX-License-Identifier: Apache-2.0
"""A connection to an engine on a transport that stands in, so that each callback comes at a chosen moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvrouter.router.model.upstream.connection import Connection


class Transport:
    """A transport that records the connection's calls; the bytes come from the test."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.closed = False
        self.paused = False

    def get_extra_info(self, name: str) -> Any:
        return self._end

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


@contextmanager
def connected(kind: type[Connection], loop: asyncio.AbstractEventLoop) -> Iterator[Connection]:
    ends = socket.socketpair()
    connection = kind(loop)
    connection.connection_made(Transport(ends[0]))  # type: ignore[arg-type]
    try:
        yield connection
    finally:
        connection.close()
        for end in ends:
            end.close()
