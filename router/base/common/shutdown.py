# SPDX-License-Identifier: Apache-2.0
"""The end of a process that serves: what it says of itself, and how its listener closes without a connection lost.

A connection is made by the kernel before anybody accepts it, and one that waits when its listener closes is reset. So
the kernel is first kept from making new ones; then those that wait are taken, and only then is the listener closed.
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

# Linux' socket.h; Python has no name for it.
SO_ATTACH_FILTER = 26
# A handshake that has begun ends a round trip later: some milliseconds within a region.
HANDSHAKE_S = 0.1
# Taking what waits takes microseconds each; longer only where no file is left to accept with.
ACCEPT_TIMEOUT_S = 2.0

# Classic BPF on the TCP header: load the byte of flags, keep SYN and ACK of it, and take no packet that is a SYN alone.
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
    """Whether this process is to end. From then on it is not ready, and its answers close their connections."""

    def __init__(self) -> None:
        self.begun = False
        self._callbacks: list[Callable[[], None]] = []

    def begin(self) -> None:
        self.begun = True
        for callback in self._callbacks:
            callback()

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Have it called when the end begins: answers without an end must find one."""
        self._callbacks.append(callback)


async def take_waiting(listeners: Sequence[socket.socket], given_up: Callable[[], bool]) -> None:
    """Returns when no connection waits at these listeners and no new one is made; they are being accepted from."""
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
    """Clients try again, and find nobody when the listener is closed. Where the system cannot do it, one in some ten
    thousand that connect at that moment is reset."""
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("=HBBI", *step) for step in NO_SYN)
    kept = ctypes.create_string_buffer(program, len(program))
    with contextlib.suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(NO_SYN), ctypes.addressof(kept))
        )
