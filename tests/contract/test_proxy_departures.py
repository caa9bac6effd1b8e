# SPDX-License-Identifier: Apache-2.0
"""Clients that go away at random moments of random exchanges leave nothing behind, and the next request is answered.

Real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
import time
from typing import Any

import pytest

from tests.contract.proxy_support import fleet, until
from tests.contract.test_proxy_short_ways import BAD, GOOD, answer, asked_whole, some_request
from tests.support.examples import examples

# The most clients that are there at once.
MOST_CLIENTS = 3
# An exchange with a scripted engine takes a few milliseconds.
LONGEST_STAY_S = 0.004
# The most bytes of the answers that a client reads before it leaves; an answer has some hundred.
MOST_READ_BYTES = 1_000
# A close with this option is a reset.
RESET = struct.pack("ii", 1, 0)


class Visit:
    """A client that sends some or all of its requests, and goes away at a random moment."""

    def __init__(self, router: Any, draw: random.Random) -> None:
        self._draw = draw
        hows = [draw.choice((*GOOD, *BAD)) for _ in range(draw.choice((1, 1, 2)))]
        if draw.random() < 0.2:
            # Alone, because a connection with a second request is not read, so its end is not seen.
            hows = ["hang"]
        self._data = b"".join(some_request(draw, how, close=False) for how in hows)
        self._client = router.connect()

    def send(self) -> None:
        is_whole = self._draw.random() < 0.7
        self._client.sendall(self._data if is_whole else self._data[: self._draw.randrange(len(self._data))])

    def stay(self) -> None:
        """Let some time pass, or read some of the answers if there are any."""
        if self._draw.random() < 0.5:
            time.sleep(self._draw.random() * LONGEST_STAY_S)
        else:
            self._client.settimeout(LONGEST_STAY_S)
            # An error: there was no answer in time, or the router has cut the connection after the engine's.
            with contextlib.suppress(OSError):
                self._client.recv(self._draw.randrange(1, MOST_READ_BYTES))

    def leave(self) -> None:
        if self._draw.random() < 0.5:
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._client.close()


@pytest.mark.property
def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    draw = random.Random(20264)
    problems: list[dict[str, Any]] = []
    with fleet(answer, answer) as (router, *engines):
        router.loop.set_exception_handler(lambda loop, context: problems.append(context))
        state = router.server.server_state
        lasting_tasks = len(asyncio.all_tasks(router.loop))
        for _ in range(examples(200)):
            visits = [Visit(router, draw) for _ in range(draw.randint(1, MOST_CLIENTS))]
            for step in (Visit.send, Visit.stay, Visit.leave):
                draw.shuffle(visits)
                for visit in visits:
                    step(visit)
            # Safety: no connection, task, or load, and no connection to an engine except those that wait in the pool.
            until(lambda: not state.connections and not state.tasks, "the clients' connections are over")
            until(lambda: len(asyncio.all_tasks(router.loop)) == lasting_tasks, "all tasks are over")
            assert router.sample("proxy_open_requests") == 0
            assert all(placed.told.count("done") == 1 for placed in router.placer.placed)
            until(
                lambda: sum(engine.open_connections for engine in engines) == idle_connections(router),
                "each connection to an engine is idle",
            )
            # Liveness: every worker answers. A good answer also makes a breaker forget failures.
            for name in ("w0", "w1"):
                assert asked_whole(router, name) == 200
        gc.collect()
        # For example a connection that nobody closed, or an error that nobody took.
        assert not problems


def idle_connections(router: Any) -> int:
    """Return how many connections to engines wait for the next request."""
    return sum(map(len, list(router.pool._idle.values())))
