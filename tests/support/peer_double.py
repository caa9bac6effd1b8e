# SPDX-License-Identifier: Apache-2.0
"""A source of chunks that speaks the peer protocol over real sockets and NIXL, and lies as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import msgspec
import numpy as np
import zmq

from kvrouter.engine_patch.offload.disk.format.checksum import default_checksum
from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.chunk_checksum import ChunkChecksum
from kvrouter.engine_patch.offload.peer.data_plane import DataPlane
from kvrouter.engine_patch.offload.peer.peer_wire import (
    Borrow,
    Hello,
    Lent,
    Present,
    Probe,
    Return,
    ToReader,
    Welcome,
    encode,
    read_by_source,
)

POLL_MS = 20
HOST = "127.0.0.1"

# Changes an answer; None sends nothing, and bytes are sent as they are.
Lie: TypeAlias = Callable[["PeerDouble", ToReader], "ToReader | bytes | None"]


class DoubleMemory:
    """Slots with random content, registered with NIXL once for all doubles of a test process."""

    def __init__(self, chunk_bytes: int, num_slots: int, plane: Callable[[int, int], DataPlane]) -> None:
        self.chunk_bytes = chunk_bytes
        self.bytes = np.random.default_rng(1).integers(0, 256, (num_slots, chunk_bytes), np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.plane = plane(self.base, self.bytes.nbytes)
        self.checksum = ChunkChecksum(default_checksum(), self.slot, chunk_bytes)

    def slot(self, number: int) -> memoryview:
        return memoryview(self.bytes[number].data)


class PeerDouble:
    """A source that holds every chunk, as it says, and whose answers a lie changes."""

    def __init__(self, memory: DoubleMemory, port: int, lie: Lie) -> None:
        self.memory, self.port = memory, port
        # The keys of the last loan.
        self.keys: Sequence[OffloadKey] = ()
        self.messages: list[Any] = []
        self._lie = lie
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def lent(self, borrow: Borrow) -> Lent:
        """Return a loan of the first slots, with the checksums of what they hold now."""
        self.keys = [OffloadKey(key) for key in borrow.keys]
        slots = [position % len(self.memory.bytes) for position in range(len(self.keys))]
        sums = [self.memory.checksum(key, slot) for key, slot in zip(self.keys, slots, strict=True)]
        return Lent(borrow.number, slots, sums)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(f"tcp://{HOST}:{self.port}")
            while not self._ends.is_set():
                if socket.poll(POLL_MS):
                    reader, frame = socket.recv_multipart()
                    message = read_by_source(frame)
                    self.messages.append(message)
                    answer = self._answer(message)
                    lie = None if answer is None else self._lie(self, answer)
                    if lie is not None:
                        socket.send_multipart([reader, lie if isinstance(lie, bytes) else encode(lie)])

    def _answer(self, message: object) -> ToReader | None:
        match message:
            case Hello():
                return Welcome(self.memory.plane.metadata, self.memory.base, self.memory.chunk_bytes)
            case Probe():
                return Present(message.number, b"\1" * len(message.keys))
            case Borrow():
                return self.lent(message)
            case Return():
                return None
        raise AssertionError(message)


def changed(kind: type[ToReader], **fields: object) -> Lie:
    """Return a lie that changes fields of one kind of answer; a function gets the double and the answer."""

    def lie(double: PeerDouble, answer: ToReader) -> ToReader:
        if not isinstance(answer, kind):
            return answer
        values = {name: value(double, answer) if callable(value) else value for name, value in fields.items()}
        return msgspec.structs.replace(answer, **values)

    return lie


def instead(kind: type[ToReader], frame: bytes | None) -> Lie:
    """Return a lie that sends a frame, or nothing, in place of one kind of answer."""
    return lambda double, answer: frame if isinstance(answer, kind) else answer


def overwritten(double: PeerDouble, answer: ToReader) -> ToReader:
    """Give the slots to other chunks after the checksums were taken."""
    if isinstance(answer, Lent):
        double.memory.bytes += 1
    return answer


def of_other_chunks(double: PeerDouble, answer: Any) -> list[int]:
    """Return the checksums of what the slots hold, under the keys of other chunks."""
    others = [OffloadKey(bytes([key[0] ^ 1]) + key[1:]) for key in double.keys]
    return [double.memory.checksum(key, slot) for key, slot in zip(others, answer.slots, strict=True)]


def nearby(double: PeerDouble, answer: Any) -> list[int]:
    """Return slots whose content is that of the neighbour."""
    return [(slot + 1) % len(double.memory.bytes) for slot in answer.slots]
