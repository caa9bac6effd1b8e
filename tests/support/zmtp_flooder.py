# SPDX-License-Identifier: Apache-2.0
"""A program that implements ZMTP itself, in order to send messages that libzmq would never send.

    python zmtp_flooder.py MODE SOCKET_TYPE [BYTES]

It prints its port, floods every connection, and ends by a signal.

MODE is one of MODES, SOCKET_TYPE is PUB or ROUTER, and BYTES is the size of a large frame.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

# ZMTP 3.0 (ZMQ RFC 23): flags of a frame.
MORE, LONG, COMMAND = 1, 2, 4
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
LARGE_BYTES = 60 * 1024**2
FRAMES = 200_000


def frame(payload: bytes, flags: int = 0) -> bytes:
    """Encode one frame."""
    if len(payload) > 255:
        return bytes([flags | LONG]) + len(payload).to_bytes(8, "big") + payload
    return bytes([flags, len(payload)]) + payload


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def ready(socket_type: bytes) -> bytes:
    """Encode the command that ends the handshake."""
    return frame(b"\x05READY" + _property(b"Socket-Type", socket_type), COMMAND)


def large_frames(large_bytes: int) -> Iterator[bytes]:
    """Yield one message of large frames without an end."""
    return itertools.repeat(frame(bytes(large_bytes), MORE))


def empty_frames(_: int) -> Iterator[bytes]:
    """Yield one message of empty frames without an end, which take 64 bytes of libzmq's memory for two on the wire."""
    return itertools.repeat(frame(b"", MORE) * 32_768)


def single_frames(_: int) -> Iterator[bytes]:
    """Yield one message without an end, whose frames come one by one: each pins a buffer of libzmq's reads."""
    return itertools.repeat(frame(bytes(40), MORE))


def many_frames(_: int) -> Iterator[bytes]:
    """Yield messages of FRAMES frames each, which take seconds to read."""
    return itertools.repeat(frame(b"", MORE) * (FRAMES - 1) + frame(b""))


def large_messages(large_bytes: int) -> Iterator[bytes]:
    """Yield whole messages, each within the bound of one."""
    payload = frame(bytes(large_bytes))
    for seq in itertools.count():
        yield frame(b"", MORE) + frame(seq.to_bytes(8, "big"), MORE)
        yield payload


MODES: dict[str, Callable[[int], Iterator[bytes]]] = {
    "large_frames": large_frames,
    "empty_frames": empty_frames,
    "single_frames": single_frames,
    "many_frames": many_frames,
    "large_messages": large_messages,
}


def flood(connection: socket.socket, socket_type: bytes, pieces: Iterator[bytes]) -> None:
    """Answer the handshake and send until the peer closes."""
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(GREETING + ready(socket_type))
        # Read the client's greeting, its READY and its subscription or request.
        received = connection.recv(65_536)
        while len(received) < len(GREETING) + 30 and (more := connection.recv(65_536)):
            received += more
        time.sleep(0.2)
        for piece in pieces:
            connection.sendall(piece)


def main() -> None:
    mode, socket_type = sys.argv[1], sys.argv[2].encode()
    large_bytes = int(sys.argv[3]) if len(sys.argv) > 3 else LARGE_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            print("connected", flush=True)
            pieces = MODES[mode](large_bytes)
            threading.Thread(target=flood, args=(connection, socket_type, pieces), daemon=True).start()


if __name__ == "__main__":
    main()
