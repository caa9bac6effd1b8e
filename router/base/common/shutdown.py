# SPDX-License-Identifier: Apache-2.0
"""The end of a process that serves: its state, and closing its listener without losing a connection.

The kernel completes a connection before the process accepts it, and resets connections that still wait when their
listener closes. So the kernel is first kept from making new connections; then the waiting ones are accepted, and only
then is the listener closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence

# The option's number in Linux' socket.h; Python has no name for it.
SO_ATTACH_FILTER = 26
# A handshake that has begun ends one round trip later: some milliseconds within a region.
HANDSHAKE_S = 0.1
# Accepting the waiting connections takes microseconds each. It takes longer only if no file descriptor is left.
ACCEPT_TIMEOUT_S = 2.0

# Classic BPF on the TCP header: load the byte of flags, keep its SYN and ACK bits, and drop packets that are a SYN
# alone.
FLAGS_AT, SYN, ACK = 13, 0x02, 0x10
LOAD_BYTE, AND, JUMP_IF_EQUAL, RETURN = 0x30, 0x54, 0x15, 0x06
WHOLE_PACKET = 0xFFFFFFFF
NO_SYN = (
    (LOAD_BYTE, 0, 0, FLAGS_AT),
    (AND, 0, 0, SYN | ACK),
    (JUMP_IF_EQUAL, 0, 1, SYN),
    (RETURN, 0, 0, 0),
    (RETURN, 0, 0, WHOLE_PACKET),
)


class Shutdown:
    """The state of this process's shutdown.

    Once it has begun, the process is not ready, and its answers close their connections.
    """

    def __init__(self) -> None:
        self.begun = False
        self._callbacks: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Begin the shutdown and run the callbacks."""
        self.begun = True
        for callback in self._callbacks:
            callback()

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the shutdown begins, for example to end answers that stream without end."""
        self._callbacks.append(callback)


async def take_waiting(listeners: Sequence[socket.socket], given_up: Callable[[], bool]) -> None:
    """Keep the kernel from making new connections, and return once all waiting ones were accepted.

    The caller's server must keep accepting from the listeners meanwhile.

    Args:
        listeners: The listening sockets.
        given_up: Returns True to stop waiting. The wait also ends after ACCEPT_TIMEOUT_S.
    """
    waiting = select.poll()
    for listener in listeners:
        _make_no_more(listener)
        waiting.register(listener.fileno(), select.POLLIN)
    await asyncio.sleep(HANDSHAKE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ACCEPT_TIMEOUT_S):
            while waiting.poll(0) and not given_up():
                await asyncio.sleep(0)


def _make_no_more(listener: socket.socket) -> None:
    """Make the kernel drop the SYN of new connections at `listener`; clients retry, and are refused after it closes.

    On other systems than Linux, one in some ten thousand clients that connect at that moment is reset.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("=HBBI", *step) for step in NO_SYN)
    filters = ctypes.create_string_buffer(program, len(program))
    with contextlib.suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(NO_SYN), ctypes.addressof(filters))
        )
