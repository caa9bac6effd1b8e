# SPDX-License-Identifier: Apache-2.0
"""Good and bad readers of an engine, in a process of their own, so that they take no time from the engine's process.

Run as a script it is the child: it takes one JSON request a line and answers each with one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Self

import msgspec
import zmq

from kvrouter.events.patch.messages import (
    REPORT_TOPIC,
    CatalogMessage,
    Events,
    Heartbeat,
    Hello,
    Refused,
    SnapshotPart,
    SnapshotRequest,
)

STOP_TIMEOUT_S = 20.0
# The limits of a stuck reader, one message and 4 KiB, are the smallest that ZMQ and the kernel allow.
STUCK_HWM = 1
STUCK_BUFFER_BYTES = 4_096
# When a stuck reader reads at last, all messages come at once; after a pause this long there are no more.
QUIET_MS = 300

_report = msgspec.msgpack.Decoder(Events | Heartbeat | CatalogMessage)
_reply = msgspec.msgpack.Decoder(Hello | SnapshotPart | Refused)


class Reader:
    """The parent's side of the child process, which is one reader at a time."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def read(self, *endpoints: str) -> None:
        """Subscribe and read everything."""
        self._ask({"do": "read", "endpoints": endpoints})

    def stick(self, *endpoints: str) -> None:
        """Subscribe and read nothing until `leave`."""
        self._ask({"do": "stick", "endpoints": endpoints})

    def load(self, requests: str) -> None:
        """Request snapshots, the next as soon as one is complete."""
        self._ask({"do": "load", "endpoints": [requests]})

    def leave(self) -> dict[str, int]:
        """Disconnect and return the counts of the patch's topic since the reader began.

        Returns:
            The number of messages (`messages`), of messages with events (`with_events`), of events, of bytes, of snapshots and
            of blocks in snapshots.
        """
        return dict(self._ask({"do": "leave"}))

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class _Child:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._reading = True
        self.found: dict[str, int] = {}

    def do(self, request: dict[str, Any]) -> dict[str, int]:
        if request["do"] == "leave":
            while not self._reading and self.turn(QUIET_MS):
                pass
            for socket in self._sockets:
                socket.close(linger=0)
            self._sockets.clear()
            return self.found
        self.found = dict.fromkeys(("messages", "with_events", "events", "bytes", "snapshots", "blocks"), 0)
        self._reading = request["do"] != "stick"
        for endpoint in request["endpoints"]:
            socket = self._context.socket(zmq.DEALER if request["do"] == "load" else zmq.SUB)
            if not self._reading:
                socket.setsockopt(zmq.RCVHWM, STUCK_HWM)
                socket.setsockopt(zmq.RCVBUF, STUCK_BUFFER_BYTES)
            if request["do"] != "load":
                socket.subscribe(b"")
            socket.connect(endpoint)
            self._sockets.append(socket)
            if request["do"] == "load":
                self._ask_snapshot(socket)
        return {}

    def readable(self) -> list[zmq.Socket[bytes]]:
        return self._sockets if self._reading else []

    def turn(self, timeout_ms: int) -> bool:
        """Take a message from each socket that has one, and return whether any had."""
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        ready = [socket for socket, _ in poller.poll(timeout_ms)]
        for socket in ready:
            self.take(socket)
        return bool(ready)

    def take(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if socket.socket_type == zmq.DEALER:
            self._take_reply(socket, frames[1])
        elif frames[0] == REPORT_TOPIC:
            self.found["messages"] += 1
            self.found["bytes"] += sum(map(len, frames))
            message = _report.decode(frames[2])
            if isinstance(message, Events):
                self.found["with_events"] += 1
                self.found["events"] += len(message.events)

    def _take_reply(self, socket: zmq.Socket[bytes], payload: bytes) -> None:
        reply = _reply.decode(payload)
        if isinstance(reply, SnapshotPart):
            self.found["bytes"] += len(payload)
            self.found["blocks"] += len(reply.hashes) // 8
            if reply.last:
                self.found["snapshots"] += 1
                self._ask_snapshot(socket)

    @staticmethod
    def _ask_snapshot(socket: zmq.Socket[bytes]) -> None:
        socket.send_multipart([b"", msgspec.msgpack.encode(SnapshotRequest(1))])


def main() -> None:
    child = _Child()
    while True:
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        for socket in child.readable():
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll())
        for socket in list(child.readable()):
            if socket in ready:
                child.take(socket)
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline()
            if not line:
                return
            print(json.dumps(child.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
