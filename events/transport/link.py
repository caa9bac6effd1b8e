# SPDX-License-Identifier: Apache-2.0
"""One connected ZMQ socket, read in an asyncio loop through its file descriptor.

That descriptor is edge-triggered and may be consumed by any call on the socket: each turn must end with
`readable`, and be repeated if it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrouter.events.transport.curve import CurveClient
from kvrouter.events.transport.settings import LinkSettings

NEWS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH


class Link:
    """A SUB or DEALER socket to one endpoint, which ZMQ connects again and again."""

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
    ) -> None:
        """Connects without waiting for the peer. Raises zmq.ZMQError when the endpoint is no address.

        receive_hwm: messages that ZMQ holds unread. topic: SUB with this prefix; None: DEALER. curve: keys with which
        both sides prove themselves and all is encrypted; None: plain. lasting: False for one request whose answer has a
        deadline, which needs neither news nor pings.
        """
        self.endpoint = endpoint
        # Whether the peer has said that it does not admit this side's key, as of the last news. ZMQ then connects no more.
        self.is_refused = False
        self._loop = loop
        # ZMQ reports no connections within a process.
        self._news: deque[bool] = deque([True] if endpoint.startswith("inproc:") else [])
        self._sockets: list[tuple[zmq.Socket[bytes], int]] = []
        self._socket = context.socket(zmq.DEALER if topic is None else zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._configure(settings, receive_hwm, curve)
            if lasting:
                self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.ping_s * 1000))
                self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.ping_answer_s * 1000))
                self._monitor = self._socket.get_monitor_socket(NEWS)
            if topic is not None:
                self._socket.subscribe(topic)
            self._socket.connect(endpoint)
            for socket in (self._socket, self._monitor):
                if socket is not None:
                    fd = int(socket.getsockopt(zmq.FD))
                    loop.add_reader(fd, on_readable)
                    self._sockets.append((socket, fd))
        except BaseException:
            self.close()
            raise

    def receive(self) -> list[bytes] | None:
        """The next message's frames; None when there is none."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def read(self, handle: Callable[[list[bytes]], None], most: int, most_bytes: int) -> bool:
        """Has each message handled until none is left (False) or the budget is spent (True).

        most, most_bytes: messages, and bytes of their last frames. handle: must not close this link.
        """
        receive = self.receive
        for _ in range(most):
            frames = receive()
            if frames is None:
                return False
            handle(frames)
            most_bytes -= len(frames[-1])
            if most_bytes <= 0:
                break
        return True

    def send(self, *frames: bytes) -> None:
        """Queues a message; dropped when a thousand wait already, as to a peer that never reads."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return

    def take_news(self) -> list[bool]:
        """Since the last call, in order: True for every handshake, False for every lost connection."""
        assert self._monitor is not None
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                break
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                self.is_refused = True
                continue
            self._news.append(event == zmq.Event.HANDSHAKE_SUCCEEDED)
        news = list(self._news)
        self._news.clear()
        return news

    def readable(self) -> bool:
        """Whether a message or news wait."""
        return any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket, _ in self._sockets)

    def close(self) -> None:
        """Closes at once; what was not sent or read is dropped. Safe to call twice."""
        for _, fd in self._sockets:
            self._loop.remove_reader(fd)
        self._sockets.clear()
        if self._monitor is not None:
            with contextlib.suppress(zmq.ZMQError):
                # The context may be gone.
                self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._socket.close(linger=0)

    def _configure(self, settings: LinkSettings, receive_hwm: int, curve: CurveClient | None) -> None:
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            curve.apply(socket)
        socket.setsockopt(zmq.RCVHWM, receive_hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, int(settings.reconnect_min_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(settings.reconnect_max_s * 1000))
        if self.endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
