# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports of 127.0.0.1, below those that the kernel gives to connections, and apart from those of other test
processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket

# Linux gives connections 32,768 and up; Redis Cluster's bus is 10,000 above its port.
FIRST, LAST = 11_000, 32_000
# As many test processes may run beside each other (pytest-xdist names them gw0, gw1 ...).
SHARES = 10


def free_port() -> int:
    """A port that nobody listens on now. The caller should bind it soon."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    size = (LAST - FIRST) // SHARES
    while True:
        port = FIRST + number * size + random.randrange(size)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
