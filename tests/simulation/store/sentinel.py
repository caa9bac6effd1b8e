# SPDX-License-Identifier: Apache-2.0
"""The server's side of a connection to Sentinel, which names the primary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import hiredis

from tests.simulation.store.commands import NotBuilt, Reply
from tests.simulation.store.session import encode

SERVICE = "kv-index"


class SentinelSession(asyncio.Protocol):
    """One client's connection; `primary` returns the host and the port that the Sentinels name to this client."""

    def __init__(self, primary: Callable[[], tuple[str, int]]) -> None:
        self._primary = primary
        self._reader = hiredis.Reader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._reader.feed(data)
        while (words := self._reader.gets()) is not False:
            out: list[bytes] = []
            encode(self._reply(words), out)
            self._transport.write(b"".join(out))

    def _reply(self, words: list[bytes]) -> Reply:
        if [word.upper() for word in words] != [b"SENTINEL", b"MASTERS"]:
            raise NotBuilt(words)
        host, port = self._primary()
        fields = {"name": SERVICE, "ip": host, "port": port, "flags": "master", "num-other-sentinels": 2}
        return [[str(part).encode() for pair in fields.items() for part in pair]]
