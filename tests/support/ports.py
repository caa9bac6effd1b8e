# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports of 127.0.0.1, below those that the kernel gives to connections, and apart from those of other test
processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time

# Linux gives connections 32,768 and up.
FIRST, LAST = 11_000, 32_000
# As many test processes may run beside each other (pytest-xdist names them gw0, gw1 ...).
SHARES = 10
WAIT_S, POLL_S = 30.0, 0.01


# Not random ones: of several that are picked before any is bound, two would be the same now and then; and who was
# connected to what listened there last may still try.
_steps = itertools.count(random.randrange(LAST))


def free_port() -> int:
    """A port that nobody listens on now, and that was not given out before by this process, until all were. The caller
    should bind it soon."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    size = (LAST - FIRST) // SHARES
    for step in itertools.islice(_steps, size):
        port = FIRST + number * size + step % size
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of {size} ports of 127.0.0.1 is free")


def until_free(port: int) -> None:
    """Returns when a port of all addresses can be bound again."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_server(("", port)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
