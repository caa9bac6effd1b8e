# SPDX-License-Identifier: Apache-2.0
"""Facts that the kernel knows about a socket and asyncio does not report."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import sys
import termios

# The size of an ioctl's int.
INT_BYTES = 4


def untaken_bytes(transport: asyncio.WriteTransport) -> int:
    """Return how many bytes were written that the other side's kernel has not yet acknowledged.

    The number includes the bytes that wait in the transport's buffer. It is 0 for a transport that is gone.
    """
    waiting = transport.get_write_buffer_size()
    socket = transport.get_extra_info("socket")
    if socket is None:
        # A closed transport of uvloop has no socket; asyncio's has one without a descriptor.
        return waiting
    with contextlib.suppress(OSError, ValueError):
        descriptor = socket.fileno()
        waiting += int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(INT_BYTES)), sys.byteorder)
    return waiting


def poller(transport: asyncio.BaseTransport, events: int) -> select.poll:
    """Return a poll object for the transport's socket; `poll(0)` shows at once which `events` or errors hold now.

    Use the poll object only while the transport is open.
    """
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), events)
    return poll
