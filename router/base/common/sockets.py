# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows of a socket and asyncio does not say."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import sys
import termios

# Of an ioctl's int.
INT_BYTES = 4


def untaken_bytes(transport: asyncio.WriteTransport) -> int:
    """What was written and is not in the other side's kernel yet: what waits here, and what was not acknowledged. 0 of
    one that is gone."""
    waiting = transport.get_write_buffer_size()
    socket = transport.get_extra_info("socket")
    if socket is None:
        # uvloop's, once it is closed; asyncio's has a socket without a descriptor.
        return waiting
    with contextlib.suppress(OSError, ValueError):
        descriptor = socket.fileno()
        waiting += int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(INT_BYTES)), sys.byteorder)
    return waiting


def poller(transport: asyncio.BaseTransport, events: int) -> select.poll:
    """`poll(0)` of it says at once which of `events` hold now, and errors; only while the transport is open."""
    found = select.poll()
    found.register(transport.get_extra_info("socket").fileno(), events)
    return found
