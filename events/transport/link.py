# SPDX-License-Identifier: Apache-2.0
"""One connected ZMQ socket, read in an asyncio loop through its file descriptor.

That descriptor is edge-triggered, and any call on the socket may consume its notice. So each turn must end with
`readable`, and must be repeated if `readable` returns True.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrouter.events.transport import libzmq
from kvrouter.events.transport.curve import CurveClient
from kvrouter.events.transport.flood_watch import SLACK_BYTES, FloodWatch, Inflow, InflowLimits, received_bytes
from kvrouter.events.transport.settings import LinkSettings

log = logging.getLogger(__name__)

NEWS = zmq.Event.CONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
# Messages of both streams have three or four frames; reading 200,000 takes seconds.
MAX_FRAMES = 16
# As a number, and frames instead of RCVMORE, because pyzmq looks up each option and flag in an enum, for a microsecond a
# message.
NOBLOCK = int(zmq.NOBLOCK)


class Link:
    """A SUB or DEALER socket to one endpoint, to which ZMQ connects again after every loss."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        settings: LinkSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        on_readable: Callable[[], object],
        receive_hwm: int,
        topic: bytes | None = None,
        curve: CurveClient | None = None,
        lasting: bool = True,
        watch: FloodWatch | None = None,
        on_flood: Callable[[str], object] = lambda reason: None,
        max_unread_bytes: int | None = None,
    ) -> None:
        """Connect without waiting for the peer. Raises zmq.ZMQError if the endpoint is no address.

        Args:
            context: Makes the sockets.
            endpoint: The address of the peer.
            settings: Bounds and times of the connection.
            loop: The event loop that reads the socket.
            on_readable: Called when a message or news may wait.
            receive_hwm: How many messages ZMQ holds unread.
            topic: Prefix to subscribe to with a SUB socket; None for a DEALER socket.
            curve: Keys with which both sides prove themselves and encrypt everything; None for a plain connection.
            lasting: False for one request whose answer has a deadline, which needs neither news nor pings.
            watch: Checks the bytes that the connection brings; None for a separate watch.
            on_flood: Called with the reason when the connection is closed because of the bytes that it brought. A
                lasting connection is opened again after a pause.
            max_unread_bytes: Bound on all whole messages that wait; None for the bound of the settings.
        """
        self.endpoint = endpoint
        # Whether the peer does not admit this side's key, as of the last news. ZMQ does not connect again after that.
        self.is_refused = False
        # Why the connection was closed because of the bytes that it brought, else empty. A lasting connection may have
        # been opened again since.
        self.flood = ""
        self._context = context
        self._settings = settings
        self._loop = loop
        self._on_readable = on_readable
        self._on_flood = on_flood
        self._receive_hwm = receive_hwm
        self._topic = topic
        self._curve = curve
        self._lasting = lasting
        self._watch = watch or FloodWatch()
        self._limits = InflowLimits(settings.max_message_bytes, max_unread_bytes or settings.max_unread_bytes)
        self._news: deque[bool] = deque()
        self._sockets: list[tuple[zmq.Socket[bytes], int]] = []
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._reopening: asyncio.TimerHandle | None = None
        # A duplicate of the TCP connection's descriptor: ZMQ may close its own, and another file may have that number
        # by the time it is used.
        self._connection: socket.socket | None = None
        self._inflow = Inflow(self._limits)
        self._delivered_bytes = 0
        # Whether the last reading left no message.
        self._is_read = True
        self._open()

    def receive(self) -> list[bytes] | None:
        """Return the next message's frames, or None if no message waits."""
        messages = self.take(1, 1)
        return messages[0] if messages else None

    def read(self, handle: Callable[[list[bytes]], None], most: int, most_bytes: int) -> bool:
        """Handle messages until none is left (returns False) or the budget is spent (returns True).

        Args:
            handle: Called with the frames of each message. It must not close this link.
            most: The budget of messages.
            most_bytes: The budget of bytes in the messages.
        """
        for frames in self.take(most, most_bytes):
            handle(frames)
        return not self._is_read

    def take(self, most: int, most_bytes: int) -> list[list[bytes]]:
        """Return the messages that wait, within both budgets."""
        socket = self._socket
        if socket is None:
            self._is_read = True
            return []
        limits = most, most_bytes, MAX_FRAMES, self._limits.max_message_bytes + SLACK_BYTES
        messages, ended, size_bytes = libzmq.read(socket, *limits) or _read(socket, *limits)
        if ended == libzmq.FAILED and not messages:
            # pyzmq raises the error.
            messages, ended, size_bytes = _read(socket, *limits)
        self._delivered_bytes += size_bytes
        self._is_read = ended == libzmq.EMPTY
        if ended == libzmq.FRAMES:
            self._end_flood(f"a message has more than {MAX_FRAMES} frames")
        elif ended == libzmq.SIZE:
            self._end_flood(f"a message has more than {self._limits.max_message_bytes} bytes")
        return messages

    def send(self, *frames: bytes) -> None:
        """Queue a message. It is dropped if a thousand wait already, as they do for a peer that never reads."""
        if self._socket is None:
            return
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return

    def take_news(self) -> list[bool]:
        """Return the news since the last call, in order: True for a handshake, False for a lost connection."""
        self._read_monitor()
        news = list(self._news)
        self._news.clear()
        return news

    def readable(self) -> bool:
        """Return whether a message or news wait."""
        return any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket, _ in self._sockets)

    def look(self, resident_bytes: int) -> None:
        """End the connection if it brought more than it may; `resident_bytes` is the memory of the process."""
        with contextlib.suppress(zmq.ZMQError):
            # After the context has ended, nothing can arrive; the next reader gets the error.
            self._judge(resident_bytes)
        if self._news:
            # Reading the monitor consumed its edge-triggered notice, so nothing else would call the reader.
            self._on_readable()

    def _judge(self, resident_bytes: int) -> None:
        self._read_monitor()
        if self._socket is None or self._connection is None:
            return
        received = received_bytes(self._connection)
        if received is None or not self._inflow.count(
            received, self._delivered_bytes, resident_bytes, is_read=self._is_read
        ):
            return
        has_message = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if problem := self._inflow.problem(resident_bytes, has_message=has_message):
            self._end_flood(problem)
        elif has_message:
            # Reading EVENTS may have consumed the edge-triggered notice, so read now.
            self._on_readable()

    def close(self) -> None:
        """Close at once, and drop all messages that were not sent or read. Safe to call twice."""
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        self._shut()

    def _open(self) -> None:
        """Create the socket and connect it. Raises zmq.ZMQError."""
        settings = self._settings
        self._socket = self._context.socket(zmq.DEALER if self._topic is None else zmq.SUB)
        try:
            self._configure(self._socket, settings)
            self._monitor = self._socket.get_monitor_socket(NEWS)
            if self._topic is not None:
                self._socket.subscribe(self._topic)
            self._socket.connect(self.endpoint)
            for socket in (self._socket, self._monitor) if self._lasting else (self._socket,):
                fd = int(socket.getsockopt(zmq.FD))
                self._loop.add_reader(fd, self._on_readable)
                self._sockets.append((socket, fd))
        except BaseException:
            self._shut()
            raise
        if self.endpoint.startswith("inproc:"):
            # ZMQ's monitor reports no connection within one process, so report it here.
            self._news.append(True)
        self._watch.add(self)

    def _shut(self) -> None:
        """Close the socket and everything that belongs to it. Repeating the call changes nothing."""
        self._watch.discard(self)
        self._forget_connection()
        for _, fd in self._sockets:
            self._loop.remove_reader(fd)
        self._sockets.clear()
        if self._monitor is not None:
            assert self._socket is not None
            with contextlib.suppress(zmq.ZMQError):
                # The call fails if the ZMQ context is terminated already.
                self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _end_flood(self, reason: str) -> None:
        """Close the socket, which frees its memory, and open a lasting connection again after a pause."""
        self._read_monitor()
        self._shut()
        self._news.append(False)
        self._is_read = True
        if self._lasting:
            self._reopening = self._loop.call_later(self._settings.reconnect_max_s, self._reopen)
        self.flood = f"{self.endpoint}: {reason}; the connection was closed"
        log.warning("an event source was cut off", extra={"reason": self.flood})
        self._on_flood(self.flood)
        self._on_readable()

    def _reopen(self) -> None:
        self._reopening = None
        try:
            self._open()
        except zmq.ZMQError:
            # No socket or descriptor is free, so try again after a pause.
            self._reopening = self._loop.call_later(self._settings.reconnect_max_s, self._reopen)

    def _read_monitor(self) -> None:
        while self._monitor is not None:
            try:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = message["event"]
            if event == zmq.Event.CONNECTED:
                self._follow_connection(int(message["value"]))
            elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                self.is_refused = True
            else:
                self._news.append(event == zmq.Event.HANDSHAKE_SUCCEEDED)
                if event == zmq.Event.DISCONNECTED:
                    self._forget_connection()

    def _follow_connection(self, descriptor: int) -> None:
        self._forget_connection()
        with contextlib.suppress(OSError):
            # The connection may be closed by now.
            self._connection = socket.socket(fileno=os.dup(descriptor))
        self._inflow = Inflow(self._limits, self._delivered_bytes)

    def _forget_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _configure(self, socket: zmq.Socket[bytes], settings: LinkSettings) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        if self._curve is not None:
            self._curve.apply(socket)
        socket.setsockopt(zmq.RCVHWM, self._receive_hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, int(settings.reconnect_min_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(settings.reconnect_max_s * 1000))
        if self._lasting:
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.ping_s * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.ping_answer_s * 1000))
        if self.endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)


def _read(
    socket: zmq.Socket[bytes], most: int, most_bytes: int, max_frames: int, max_message_bytes: int
) -> tuple[list[list[bytes]], int, int]:
    """Read as `libzmq.read` does, by pyzmq. Raises zmq.ZMQError if that comes before any message."""
    messages: list[list[bytes]] = []
    total_bytes = 0
    while len(messages) < most and most_bytes > 0:
        frames: list[bytes] = []
        size_bytes, more = 0, True
        while more:
            if len(frames) == max_frames:
                return messages, libzmq.FRAMES, total_bytes
            try:
                frame = socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                return messages, libzmq.EMPTY, total_bytes
            except zmq.ZMQError:
                if messages:
                    return messages, libzmq.FAILED, total_bytes
                raise
            frames.append(frame.bytes)
            size_bytes += len(frames[-1])
            total_bytes += len(frames[-1])
            more = frame.more
        if size_bytes > max_message_bytes:
            return messages, libzmq.SIZE, total_bytes
        messages.append(frames)
        most_bytes -= size_bytes
    return messages, libzmq.SPENT, total_bytes
