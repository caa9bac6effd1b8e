# SPDX-License-Identifier: Apache-2.0
"""Sends messages of a hand-over to engines and waits for their answers; blocking, for a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from kvrouter.events.peer.hand_over import MAX_HAND_OVER_BYTES, HandOverReply, HandOverRequest, encode, read_reply
from kvrouter.events.transport.curve import CurveClient


class HandOverMessage(NamedTuple):
    """A message, and the engine that it is for."""

    host: str
    port: int
    # The public CURVE key of the engine's socket; empty without encryption.
    key: str
    request: HandOverRequest

    @property
    def endpoint(self) -> str:
        """The engine's address in the form of ZMQ."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def ask_engines(
    messages: Sequence[HandOverMessage], timeout_s: float, secret: bytes | None
) -> list[HandOverReply | None]:
    """Return the answer to each message, or None if it did not come in time.

    Args:
        messages: The messages.
        timeout_s: How long to wait for all of them together.
        secret: The CURVE key by which engines that list their clients know this one; None: a new one for each message.
    """
    replies: list[HandOverReply | None] = [None] * len(messages)
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, len(messages) + 1)
        poller = zmq.Poller()
        waiting: dict[zmq.Socket[bytes], int] = {}
        try:
            for number, message in enumerate(messages):
                socket = context.socket(zmq.DEALER)
                waiting[socket] = number
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_HAND_OVER_BYTES)
                socket.setsockopt(zmq.IPV6, 1)
                try:
                    if message.key:
                        CurveClient(message.key, secret).apply(socket)
                    socket.connect(message.endpoint)
                except zmq.ZMQError:
                    # An address or a key that cannot be used has no answer.
                    continue
                socket.send(encode(message.request))
                poller.register(socket, zmq.POLLIN)
            end_s = time.monotonic() + timeout_s
            while poller.sockets and (left_s := end_s - time.monotonic()) > 0:
                for ready, _ in poller.poll(int(left_s * 1000) + 1):
                    replies[waiting[ready]] = read_reply(ready.recv())
                    poller.unregister(ready)
        finally:
            for socket in waiting:
                socket.close(0)
    return replies
