# SPDX-License-Identifier: Apache-2.0
"""A `FakeEngine` behind wires that can be cut and mended while the engine keeps running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import zmq

from tests.support.fake_engine import FakeEngine
from tests.support.wire import Wire


class CutEngine(FakeEngine):
    """A fake engine whose endpoints are those of the wires in front of it; `close` ends both."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, replay: bool = True) -> None:
        super().__init__(context, replay=replay)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._wires = [self._opened(self.endpoint)]
        self.endpoint = self._wires[0].endpoint
        if self.replay_endpoint is not None:
            self._wires.append(self._opened(self.replay_endpoint))
            self.replay_endpoint = self._wires[1].endpoint

    def cut(self) -> None:
        """End all connections and refuse further ones until `mend`."""

        def cut() -> None:
            for wire in self._wires:
                wire.refusing = True
                wire.cut()

        self._do(cut)

    def mend(self) -> None:
        def heal() -> None:
            for wire in self._wires:
                wire.heal()

        self._do(heal)

    def restart(self) -> None:
        raise NotImplementedError("another life has other ports")

    def close(self) -> None:
        for wire in self._wires:
            asyncio.run_coroutine_threadsafe(wire.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super().close()

    def begin_anew(self, seq: int) -> None:
        """Replace the engine by a restarted one behind the same wires, whose next batch has this seq."""
        self.publisher.close()
        replay = None if self.replay_endpoint is None else "tcp://127.0.0.1:0"
        self.publisher = self._open("tcp://127.0.0.1:0", replay)
        self.publisher.skip_seq(seq)
        targets = [self.publisher.endpoint, self.publisher.replay_endpoint]

        def turn() -> None:
            for wire, endpoint in zip(self._wires, targets, strict=False):
                wire.target = _port(endpoint)

        self._do(turn)

    def _opened(self, endpoint: str) -> Wire:
        wire = Wire()
        wire.target = _port(endpoint)
        asyncio.run_coroutine_threadsafe(wire.open(), self._loop).result()
        return wire

    def _do(self, work: Callable[[], Any]) -> None:
        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()


def _port(endpoint: str | None) -> int:
    assert endpoint is not None
    return int(endpoint.rsplit(":", 1)[1])
