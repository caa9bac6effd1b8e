# SPDX-License-Identifier: Apache-2.0
"""The store of `store/` as a server on the simulated network, with its faults."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from tests.simulation.network import End, Host
from tests.simulation.store.session import Session
from tests.simulation.store.store import PORT, Former, Store

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

# The store's wall clock when the simulation's is 0.
EPOCH_S = 1_700_000_000.0


class _ServerTransport(asyncio.Transport):
    """The server's side of one connection."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self._end = end

    def write(self, data: Any) -> None:
        self._end.send(bytes(data))

    def is_closing(self) -> bool:
        return not self._end.is_open

    def close(self) -> None:
        self._end.close()

    def abort(self) -> None:
        self._end.close(ConnectionResetError("reset by the store"))


class StoreServer:
    """One server, which clients reach at `host`."""

    def __init__(self, loop: VirtualLoop, host: Host, rng: random.Random) -> None:
        self._loop, self.host = loop, host
        self._process = loop.add_process(host.name)
        self.store = Store(lambda: EPOCH_S + loop.time(), rng)
        self._listen()

    @property
    def is_up(self) -> bool:
        """Whether the server runs."""
        return self.store.is_up

    def _listen(self) -> None:
        self.host.is_up = True
        self.host.listeners[PORT] = self._accept

    def _accept(self, end: End) -> None:
        session = Session(self.store.node, end.peer.host.name)
        run = self._process.run
        run(session.connection_made, _ServerTransport(end))
        end.on_data = lambda data: run(session.data_received, data)
        end.on_closed = lambda error: run(session.connection_lost, error)

    def crash(self, lose_last: int, *, silently: bool = False) -> None:
        """Kill the server, which loses its last writes; `silently` with its machine."""
        if self.is_up:
            self._loop.network.fell(self.host, silently=silently)
            self.host.is_up = not silently
            self._process.run(self.store.crash, lose_last)

    def restart(self, *, with_data: bool, loading_s: float = 0.0) -> None:
        """Start the server again, with what its disk has or empty."""
        if not self.is_up:
            if not with_data:
                self._process.run(self.store.flushall)
            self._process.run(self.store.start, loading_s)
            self._listen()

    def failover(self, lose_last: int, former: Former) -> None:
        """Put a replica in the place of the server."""
        if self.is_up:
            self._process.run(self.store.failover, lose_last, former)

    def run(self, call: Any, *args: object) -> Any:
        """Call one of the store's methods as the server does."""
        return self._process.run(call, *args)
