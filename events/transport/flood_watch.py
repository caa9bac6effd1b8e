# SPDX-License-Identifier: Apache-2.0
"""Which connections bring more than they may while nothing of it can be read.

ZMQ hands over a message when its last frame is there, and counts whole messages alone: its limit of a message
(ZMQ_MAXMSGSIZE) is one of a frame, and its high-water mark does not see a message that never ends. The kernel counts
what a connection received, encrypted or not, and the process sees its own memory; both together show what waits inside
ZMQ. The counting is pure, `FloodWatch` is its shell.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

# A look at the process's memory; a flood brings some 50 MB meanwhile over a loopback, 60 over 10 Gbit/s.
LOOK_S = 0.05
# All connections are looked at after this time, or as soon as the memory rose by this much since they were.
FULL_LOOK_S = 1.0
RISE_BYTES = 16 << 20
# Below this, what a connection brought is no flood: pings of four days, or 32 MiB of memory where all frames are empty
# (two bytes on the wire, 64 in ZMQ).
SMALL_BYTES = 1 << 20
# By so much the memory of the process may grow while a connection brings a message that does not end. A message of few
# frames takes what `max_message_bytes` allows; this bounds one of small frames.
MAX_GROWTH_BYTES = 128 << 20
# What the kernel has received and ZMQ has not read, and the beginning of a message that came before the last look.
SLACK_BYTES = 8 << 20

MIB = 1 << 20
# Linux' tcp_info up to tcpi_bytes_received, since Linux 4.1. Source: include/uapi/linux/tcp.h.
TCP_INFO_BYTES = 136
_BYTES_RECEIVED = struct.Struct("=128xQ")
STATM = Path("/proc/self/statm")


class InflowLimits(msgspec.Struct, frozen=True):
    """What one connection may bring before it is read."""

    # Of one message, all frames together.
    max_message_bytes: int
    # Of whole messages that wait.
    max_unread_bytes: int


class Inflow:
    """What one connection brought that was not read. Pure.

    Messages do not mix, so all that came after the last one that was read is of one unfinished message, wherever nothing
    can be read."""

    __slots__ = ("_base_bytes", "_delivered_bytes", "_limits", "_resident_bytes", "unread_bytes")

    def __init__(self, limits: InflowLimits, delivered_bytes: int = 0) -> None:
        """delivered_bytes: read from the socket before this connection."""
        self._limits = limits
        # Bytes that are not payload (framing, handshake, pings), as of the last time that all was read.
        self._base_bytes = -delivered_bytes
        self._delivered_bytes = delivered_bytes
        # The process's memory when this connection had last brought next to nothing, or was looked at first.
        self._resident_bytes: int | None = None
        self.unread_bytes = 0

    def count(self, received_bytes: int, delivered_bytes: int, resident_bytes: int, *, is_read: bool) -> bool:
        """Count what came, and return whether it is enough to be judged.

        Args:
            received_bytes: by the kernel, since the connection began.
            delivered_bytes: frames that were read from the socket, ever.
            resident_bytes: memory of the process.
            is_read: whether the last reading left nothing.
        """
        if is_read and delivered_bytes != self._delivered_bytes:
            self._base_bytes = received_bytes - delivered_bytes
        self._delivered_bytes = delivered_bytes
        self.unread_bytes = received_bytes - delivered_bytes - self._base_bytes
        if self._resident_bytes is None or self.unread_bytes <= SMALL_BYTES:
            self._resident_bytes = resident_bytes
        return self.unread_bytes > SMALL_BYTES

    def problem(self, resident_bytes: int, *, has_message: bool) -> str:
        """Return why the connection must end, or "". has_message: whether a whole message waits."""
        unread = self.unread_bytes
        limits = self._limits
        if has_message:
            if unread <= limits.max_unread_bytes:
                return ""
            return f"{unread // MIB} MiB of messages came faster than they could be read"
        if unread > limits.max_message_bytes + SLACK_BYTES:
            return f"{unread // MIB} MiB came without the end of a message, which may have {limits.max_message_bytes // MIB}"
        grown = resident_bytes - (self._resident_bytes or 0)
        if grown > MAX_GROWTH_BYTES:
            return f"a message of many frames does not end: {unread // MIB} MiB of it came, and memory grew by {grown // MIB} MiB"
        return ""


class Watched(Protocol):
    """A connection that is looked at."""

    def look(self, resident_bytes: int) -> None:
        """Judge what came, and end the connection where that is too much."""


class FloodWatch:
    """Looks at all connections of one event loop, again and again while there are any."""

    def __init__(self, resident: Callable[[], int] | None = None) -> None:
        """resident: the memory of the process; None: as the kernel says."""
        self._resident = resident or resident_bytes
        self._links: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        # When all were looked at last, and the least memory since.
        self._looked_s = -math.inf
        self._least_bytes = 0

    def add(self, link: Watched) -> None:
        """Look at this connection of the running loop from now on."""
        self._links.add(link)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOOK_S, self._look, loop)

    def discard(self, link: Watched) -> None:
        """Look at it no longer. Repeating it changes nothing."""
        self._links.discard(link)
        if not self._links and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(LOOK_S, self._look, loop)
        resident_bytes, now_s = self._resident(), loop.time()
        self._least_bytes = min(self._least_bytes, resident_bytes)
        if resident_bytes - self._least_bytes < RISE_BYTES and now_s - self._looked_s < FULL_LOOK_S:
            return
        self._looked_s, self._least_bytes = now_s, resident_bytes
        for link in tuple(self._links):
            link.look(resident_bytes)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def received_bytes(connection: socket.socket) -> int | None:
    """Return the bytes that a TCP connection received in its life; None for another kind of connection."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        (received,) = _BYTES_RECEIVED.unpack(info)
    except (OSError, struct.error):
        return None
    return int(received)
