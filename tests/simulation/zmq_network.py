# SPDX-License-Identifier: Apache-2.0
"""ZMQ over the simulated network: the calls that the router's links make, and an engine's PUB and ROUTER sockets.

Modelled are: handshakes and their news, reconnection, ZMQ's own pings, subscriptions that arrive late, messages that
wait in both directions, high-water marks, and the notice of a descriptor, which any call on the socket may take.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from tests.simulation.network import End, Host, Network

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

Frames = list[bytes]
# Descriptors of simulated sockets lie above those of any real file.
FIRST_DESCRIPTOR = 1_000_000
# ZMQ's default high-water mark.
DEFAULT_HWM = 1_000


class _Greeting:
    """The first message in each direction. A client's has its subscription."""

    def __init__(self, topic: bytes | None) -> None:
        self.topic = topic


class SimulatedContext:
    """The `zmq.Context` of one process."""

    def __init__(self, loop: VirtualLoop, host: Host, rng: random.Random) -> None:
        self.loop, self.host, self.rng = loop, host, rng
        self.open_sockets: dict[ClientSocket, None] = {}

    def socket(self, kind: int) -> ClientSocket:
        """Return a SUB or DEALER socket."""
        return ClientSocket(self, kind)


class _Readable:
    """The source behind a descriptor: the socket's messages, or its monitor's."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.fd = FIRST_DESCRIPTOR + loop.next_number()
        self.inbox: deque[Frames] = deque()
        # Whether the descriptor is readable; any call on the socket may change that.
        self.has_notice = False

    def put(self, frames: Frames) -> None:
        self.inbox.append(frames)
        if not self.has_notice:
            self.has_notice = True
            self.loop.notify(self.fd, self._take_notice)

    def _take_notice(self) -> bool:
        return self.has_notice

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self.fd
        if option == zmq.EVENTS:
            self.has_notice = False
            return int(zmq.POLLIN) if self.inbox else 0
        raise NotImplementedError(f"option {option}")


class MonitorSocket(_Readable):
    """The socket on which ZMQ reports what happens to a connection."""

    def recv_multipart(self, flags: int = 0) -> Frames:
        """Return the next report. Raises zmq.Again."""
        self.has_notice = False
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def report(self, event: int, endpoint: str) -> None:
        """Report an event. The value names no descriptor that exists."""
        self.put([struct.pack("=hi", int(event), -1), endpoint.encode()])

    def close(self, linger: int | None = None) -> None:
        """Drop what was not read."""
        self.inbox.clear()


class ClientSocket(_Readable):
    """A SUB or DEALER socket that connects to one endpoint, again after every loss."""

    def __init__(self, context: SimulatedContext, kind: int) -> None:
        super().__init__(context.loop)
        self._context, self._kind = context, kind
        self._options: dict[int, Any] = {}
        self._topic: bytes | None = None
        self._monitor: MonitorSocket | None = None
        self._endpoint = ""
        self._end: End | None = None
        self._is_greeted = False
        self._outbox: deque[Frames] = deque()
        self._partial: deque[bytes] = deque()
        self._is_closed = False
        self._pause_s = 0.0
        context.open_sockets[self] = None

    # -- the calls of a link

    def setsockopt(self, option: int, value: Any) -> None:
        self._options[option] = value

    def get_monitor_socket(self, events: int) -> MonitorSocket:
        self._monitor = MonitorSocket(self.loop)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def subscribe(self, topic: bytes) -> None:
        self._topic = topic

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._pause_s = self._options.get(zmq.RECONNECT_IVL, 100) / 1_000
        self._dial()
        if ping_ms := self._options.get(zmq.HEARTBEAT_IVL):
            self._ping(ping_ms / 1_000, self._options[zmq.HEARTBEAT_TIMEOUT] / 1_000)

    def recv(self, flags: int, copy: bool) -> zmq.Frame:
        """Return the next frame. Raises zmq.Again."""
        self.has_notice = False
        if not self._partial:
            if not self.inbox:
                raise zmq.Again
            self._partial.extend(self.inbox.popleft())
            end = self._end
            if end is not None and end.is_full and len(self.inbox) < self._receive_hwm // 2:
                end.resume()
        frame = zmq.Frame(self._partial.popleft())
        frame.more = bool(self._partial)
        return frame

    def send_multipart(self, frames: Any, flags: int = 0) -> None:
        """Queue a message. Raises zmq.Again beyond the high-water mark."""
        self.has_notice = False
        if len(self._outbox) >= DEFAULT_HWM:
            raise zmq.Again
        self._outbox.append(list(frames))
        self._flush()

    def close(self, linger: int | None = None) -> None:
        if not self._is_closed:
            self._is_closed = True
            del self._context.open_sockets[self]
            if self._end is not None:
                self._end.close()

    # -- the connection

    @property
    def _receive_hwm(self) -> int:
        return int(self._options.get(zmq.RCVHWM, DEFAULT_HWM))

    def _dial(self) -> None:
        host, _, port = self._endpoint.removeprefix("tcp://").rpartition(":")
        self.loop.network.dial(
            self._context.host, host, int(port), self._open, self._retry, lambda: not self._is_closed
        )

    def _retry(self) -> None:
        longest_s = self._options.get(zmq.RECONNECT_IVL_MAX, 0) / 1_000
        pause_s = self._pause_s * self._context.rng.uniform(1.0, 2.0)
        self._pause_s = min(2 * self._pause_s, max(longest_s, self._pause_s))
        self.loop.after(pause_s, lambda: None if self._is_closed else self._dial())

    def _open(self, end: End) -> None:
        self._end, self._is_greeted = end, False
        end.on_data = self._take
        end.on_closed = self._lose
        self._report(zmq.Event.CONNECTED)
        end.send(_Greeting(self._topic))

    def _take(self, data: Any) -> None:
        if isinstance(data, _Greeting):
            self._is_greeted = True
            self._pause_s = self._options.get(zmq.RECONNECT_IVL, 100) / 1_000
            self._report(zmq.Event.HANDSHAKE_SUCCEEDED)
            self._flush()
            return
        self.put(data)
        if self._end is not None and len(self.inbox) >= self._receive_hwm:
            self._end.is_full = True

    def _lose(self, error: Exception | None) -> None:
        self._end, self._is_greeted = None, False
        if not self._is_closed:
            self._report(zmq.Event.DISCONNECTED)
            self._retry()

    def _flush(self) -> None:
        while self._outbox and self._is_greeted and self._end is not None:
            self._end.send(self._outbox.popleft())

    def _ping(self, ping_s: float, answer_s: float) -> None:
        """Give up a connection on which nothing arrives, as ZMQ's pings find out."""

        def look() -> None:
            if self._is_closed:
                return
            end = self._end
            if end is not None and end.stalled_s is not None:
                network = self.loop.network
                is_answered = not end.peer.is_open and end.peer.host.is_up and not network.is_cut(end)
                if is_answered or self.loop.time() - end.stalled_s >= answer_s:
                    end.close()
                    self._lose(None)
            self.loop.after(ping_s, look)

        self.loop.after(ping_s * self._context.rng.random(), look)

    def _report(self, event: int) -> None:
        if self._monitor is not None:
            self._monitor.report(event, self._endpoint)


class Publisher:
    """An engine's PUB socket."""

    def __init__(self, network: Network, host: Host, port: int, *, hwm: int) -> None:
        self._hwm = hwm
        self._readers: dict[End, bytes] = {}
        self.dropped = 0
        self._network = network
        host.listeners[port] = self._accept

    def _accept(self, end: End) -> None:
        def take(data: Any) -> None:
            if isinstance(data, _Greeting):
                end.send(_Greeting(None))
                # The subscription is applied a little after the handshake.
                self._network.loop.after(self._network.latency_s(), lambda: self._admit(end, data.topic or b""))

        end.on_data = take
        end.on_closed = lambda error: self._drop(end)

    def _admit(self, end: End, topic: bytes) -> None:
        if end.is_open:
            self._readers[end] = topic

    def _drop(self, end: End) -> None:
        self._readers.pop(end, None)

    def publish(self, frames: Frames, lost: Callable[[], bool] = lambda: False) -> None:
        """Send a message to all subscribers of its topic that have room."""
        for end, topic in list(self._readers.items()):
            if frames[0].startswith(topic):
                if end.backlog >= self._hwm or lost():
                    self.dropped += 1
                else:
                    end.send(list(frames))


class Responder:
    """An engine's ROUTER socket: each request is answered after a while, perhaps in parts, or never."""

    def __init__(
        self,
        network: Network,
        host: Host,
        port: int,
        answers: Callable[[Frames], list[Frames]],
        pause_s: Callable[[], float],
        part_pause_s: Callable[[], float],
    ) -> None:
        """Answer at a port.

        Args:
            network: The network.
            host: The host of the engine.
            port: The port.
            answers: Returns the messages of an answer.
            pause_s: Returns the time until an answer begins.
            part_pause_s: Returns the time between two messages of an answer.
        """
        self._network, self._answers, self._pause_s, self._part_pause_s = network, answers, pause_s, part_pause_s
        host.listeners[port] = self._accept

    def _accept(self, end: End) -> None:
        def take(data: Any) -> None:
            if isinstance(data, _Greeting):
                end.send(_Greeting(None))
            else:
                self._network.loop.after(self._pause_s(), lambda: self._reply(end, data))

        end.on_data = take

    def _reply(self, end: End, request: Frames) -> None:
        if end.is_open:
            self._send(end, deque(self._answers(request)))

    def _send(self, end: End, parts: deque[Frames]) -> None:
        while parts and end.is_open:
            end.send(parts.popleft())
            if parts and (pause_s := self._part_pause_s()):
                self._network.loop.after(pause_s, lambda: self._send(end, parts))
                return
