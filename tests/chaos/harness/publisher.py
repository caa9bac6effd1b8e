# SPDX-License-Identifier: Apache-2.0
"""vLLM's publisher with faults on demand: lost, doubled or swapped batches, and incomplete, missing or false replays.

It sends in the caller's thread, so that the batch of each seq is certain. `serve` answers replay requests and must be
called often, as vLLM's publisher does between two batches.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import zmq

from kvrouter.events.vllm.wire import END_SEQ, SEQ_BYTES

ANY_PORT = "tcp://127.0.0.1:0"


class Replay(StrEnum):
    """The way in which replay requests are answered."""

    HONEST = "honest"
    MUTE = "mute"  # never
    HOLES = "holes"  # every third batch is missing
    EMPTY = "empty"  # the end marker and nothing before it
    ENDLESS = "endless"  # half of it, and no end marker
    FORGED = "forged"  # the first batch is another one


class ChaosPublisher:
    """The publisher of one life of an engine."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, replay: bool, ring: int, hwm: int, first_seq: int = 0
    ) -> None:
        self.next_seq = first_seq
        self.replay = Replay.HONEST
        # How many of the next batches are kept for replay but not sent, are neither kept nor sent, are sent twice, and
        # are swapped with their successor.
        self.unsent = self.lost = self.doubled = self.swapped = 0
        self._held_back: tuple[int, bytes] | None = None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.set_hwm(hwm)
        if hwm < 1_000:
            # Otherwise the kernel's buffer holds far more than the mark.
            self._pub.setsockopt(zmq.SNDBUF, 4_096)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._router: zmq.Socket[bytes] | None = None
        self.replay_port: int | None = None
        if replay:
            self._router = context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.set_hwm(0)
            self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")

    def publish(self, payload: bytes) -> int:
        """Send one batch, unless a fault loses or changes it, and return its seq."""
        seq = self.next_seq
        self.next_seq += 1
        if self.lost:
            self.lost -= 1
            return seq
        self._ring.append((seq, payload))
        if self.unsent:
            self.unsent -= 1
        elif self.swapped and self._held_back is None:
            self.swapped -= 1
            self._held_back = (seq, payload)
        else:
            self._send(seq, payload)
            if self.doubled:
                self.doubled -= 1
                self._send(seq, payload)
            if self._held_back is not None:
                self._send(*self._held_back)
                self._held_back = None
        return seq

    def behave(self) -> None:
        """End all faults."""
        self.unsent = self.lost = self.doubled = self.swapped = 0
        self.replay = Replay.HONEST

    def serve(self) -> None:
        """Answer the replay requests that have arrived."""
        while self._router is not None:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and self.replay is not Replay.MUTE:
                self._answer(self._router, frames[0], int.from_bytes(frames[2], "big"))

    def close(self) -> None:
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)

    def _send(self, seq: int, payload: bytes) -> None:
        self._pub.send_multipart((b"", seq.to_bytes(SEQ_BYTES, "big"), payload), zmq.NOBLOCK)

    def _answer(self, router: zmq.Socket[bytes], client: bytes, start: int) -> None:
        batches = [(seq, payload) for seq, payload in self._ring if seq >= start]
        if self.replay is Replay.HOLES:
            batches = [batch for i, batch in enumerate(batches) if i % 3 != 1]
        elif self.replay is Replay.EMPTY:
            batches = []
        elif self.replay is Replay.ENDLESS:
            batches = batches[: len(batches) // 2]
        elif self.replay is Replay.FORGED and start > 0 and len(batches) > 1:
            batches[0] = (batches[0][0], batches[1][1])
        for seq, payload in batches:
            router.send_multipart((client, b"", b"", seq.to_bytes(SEQ_BYTES, "big"), payload))
        if self.replay is not Replay.ENDLESS:
            router.send_multipart((client, b"", b"", END_SEQ, b""))
