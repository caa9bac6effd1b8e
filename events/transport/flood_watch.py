# SPDX-License-Identifier: Apache-2.0
"""Detection of connections that bring more than they may while none of their messages can be read.

ZMQ hands over a message only when its last frame has arrived, and its limits do not see a message that never ends:
ZMQ_MAXMSGSIZE bounds one frame, and the high-water mark counts whole messages. So two measurements from outside are
combined to show how much waits inside ZMQ: the kernel counts the bytes that a connection received, encrypted or not,
and the process measures its own memory. The counting is pure; `FloodWatch` is its shell.
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

# Time between two looks at the process's memory. A flood brings some 50 MB in this time over a loopback, 60 over 10
# Gbit/s.
LOOK_S = 0.05
# All connections are checked after this time, or as soon as the memory has risen by RISE_BYTES since the last check.
FULL_LOOK_S = 1.0
RISE_BYTES = 16 << 20
# Unread bytes up to this number are never judged as a flood. They amount to four days of ZMQ's pings, or to 32 MiB of
# memory if all frames are empty (two bytes on the wire, 64 in ZMQ).
SMALL_BYTES = 1 << 20
# The limit of the process's growth while a connection brings a message that does not end. For a message of a few large
# frames, `max_message_bytes` is the bound; this one bounds a message of small frames.
MAX_GROWTH_BYTES = 128 << 20
# An allowance for bytes that the kernel has received but ZMQ has not read yet, and for the beginning of a message that
# had already arrived at the previous check.
SLACK_BYTES = 8 << 20

MIB = 1 << 20
# Linux' tcp_info up to tcpi_bytes_received, since Linux 4.1. Source: include/uapi/linux/tcp.h.
TCP_INFO_BYTES = 136
_BYTES_RECEIVED = struct.Struct("=128xQ")
STATM = Path("/proc/self/statm")
_STATM_NAME = str(STATM)
# More than its seven numbers have.
STATM_BYTES = 256
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class InflowLimits(msgspec.Struct, frozen=True):
    """The bytes that one connection may bring before they are read."""

    # The size of one message, all frames together.
    max_message_bytes: int
    # The size of all whole messages that wait to be read.
    max_unread_bytes: int


class Inflow:
    """The unread bytes that one connection brought. Pure.

    ZMQ does not interleave the messages of a connection. So if nothing can be read, all bytes since the last message
    that was read belong to one unfinished message.
    """

    __slots__ = ("_base_bytes", "_delivered_bytes", "_limits", "_resident_bytes", "unread_bytes")

    def __init__(self, limits: InflowLimits, delivered_bytes: int = 0) -> None:
        """Begin with a new connection. `delivered_bytes` were read from the socket before this connection."""
        self._limits = limits
        # The received bytes that belong to no message (framing, handshake, pings). They are known only when all
        # messages have been read, so this is their count at the last such time.
        self._base_bytes = -delivered_bytes
        self._delivered_bytes = delivered_bytes
        # The process's memory when this connection last had next to nothing unread, or at its first check.
        self._resident_bytes: int | None = None
        self.unread_bytes = 0

    def count(self, received_bytes: int, delivered_bytes: int, resident_bytes: int, *, is_read: bool) -> bool:
        """Count the bytes that came, and return whether they are enough to be judged.

        Args:
            received_bytes: Bytes that the kernel received since the connection began.
            delivered_bytes: Bytes of all frames that were ever read from the socket.
            resident_bytes: The memory of the process.
            is_read: Whether the last reading left no message.
        """
        if is_read and delivered_bytes != self._delivered_bytes:
            self._base_bytes = received_bytes - delivered_bytes
        self._delivered_bytes = delivered_bytes
        self.unread_bytes = received_bytes - delivered_bytes - self._base_bytes
        if self._resident_bytes is None or self.unread_bytes <= SMALL_BYTES:
            self._resident_bytes = resident_bytes
        return self.unread_bytes > SMALL_BYTES

    def problem(self, resident_bytes: int, *, has_message: bool) -> str:
        """Return why the connection must end, or "" if it may stay.

        Args:
            resident_bytes: The memory of the process.
            has_message: Whether a whole message waits.
        """
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
    """The interface of a connection that `FloodWatch` checks."""

    def look(self, resident_bytes: int) -> None:
        """Judge the bytes that came, and end the connection if they are too many."""


class FloodWatch:
    """A periodic check of all connections of one event loop, which runs while there are any."""

    def __init__(
        self, resident: Callable[[], int] | None = None, pause_s: Callable[[float], float] = lambda period_s: period_s
    ) -> None:
        """Watch no connection yet.

        Args:
            resident: Returns the memory of the process; by default it is read from the kernel.
            pause_s: Returns the time until the next look, which is at most the given one.
        """
        self._resident = resident or resident_bytes
        self._pause_s = pause_s
        # In the order in which they were added.
        self._links: dict[Watched, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        # When all connections were last checked, and the least memory since then.
        self._looked_s = -math.inf
        self._least_bytes = 0

    def add(self, link: Watched) -> None:
        """Check this connection of the running loop from now on."""
        self._links[link] = None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._pause_s(LOOK_S), self._look, loop)

    def discard(self, link: Watched) -> None:
        """Stop checking the connection. Repeating the call changes nothing."""
        self._links.pop(link, None)
        if not self._links and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._pause_s(LOOK_S), self._look, loop)
        resident_bytes, now_s = self._resident(), loop.time()
        self._least_bytes = min(self._least_bytes, resident_bytes)
        if resident_bytes - self._least_bytes < RISE_BYTES and now_s - self._looked_s < FULL_LOOK_S:
            return
        self._looked_s, self._least_bytes = now_s, resident_bytes
        for link in tuple(self._links):
            link.look(resident_bytes)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    # This is read often, and a text file would need four times as many system calls.
    descriptor = os.open(_STATM_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, STATM_BYTES).split()[1]) * PAGE_BYTES
    finally:
        os.close(descriptor)


def received_bytes(connection: socket.socket) -> int | None:
    """Return how many bytes a TCP connection has received since it began; None for another kind of connection."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        (received,) = _BYTES_RECEIVED.unpack(info)
    except (OSError, struct.error):
        return None
    return int(received)
