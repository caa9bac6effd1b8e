# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports of 127.0.0.1.

They are below the ports that the kernel gives to outgoing connections, and each test process has its own range.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time

# Linux gives outgoing connections the ports 32,768 and up.
FIRST, LAST = 11_000, 32_000
# The number of test processes that may run at the same time (pytest-xdist names them gw0, gw1 ...).
SHARES = 10
WAIT_S, POLL_S = 30.0, 0.01


# The ports are not picked at random: two of several that are picked before any is bound would sometimes be equal, and a
# client of the port's previous listener may still try to connect to it.
_steps = itertools.count(random.randrange(LAST))


def free_port() -> int:
    """Return a port that nobody listens on now; the caller should bind it soon.

    A process returns each port of its range once before it returns one again.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    size = (LAST - FIRST) // SHARES
    for step in itertools.islice(_steps, size):
        port = FIRST + number * size + step % size
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of {size} ports of 127.0.0.1 is free")


def free_ports(count: int) -> int:
    """Return the first of several successive ports that nobody listens on now."""
    ports = [free_port() for _ in range(count)]
    while ports[-1] - ports[0] != count - 1:
        ports = [*ports[1:], free_port()]
    return ports[0]


def until_free(port: int) -> None:
    """Wait until a port can be bound again on all addresses."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_server(("", port)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
