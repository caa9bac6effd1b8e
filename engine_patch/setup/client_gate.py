# SPDX-License-Identifier: Apache-2.0
"""Decides which clients the patch's CURVE sockets admit: those whose public keys a file lists.

libzmq sends a request about every handshake to a socket at a fixed address of its context (ZAP, ZMQ RFC 27), from its
own thread. A thread of this module replies, so neither the engine nor the reporter waits for the file. No handshake
completes without a reply.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils import z85

from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.transport.curve import KEY

HANDLER = "inproc://zeromq.zap.01"
VERSION = b"1.0"
ADMITTED, REFUSED, FAILED = (b"200", b"OK"), (b"400", b"the key is not listed"), (b"500", b"the list failed")
# Frames of a request: version, id, domain, address, routing id, mechanism, and for CURVE the client's public key.
REQUEST_FRAMES = 7
COMMENT = "#"
# A fleet has some tens of routers, so a larger file is no list of keys.
MAX_FILE_BYTES = 1 << 20


class ClientList:
    """The public keys that a file lists, one in Z85 on each line, optionally followed by white space and a name.

    The file is read again when it changes; if the new content cannot be used, the former keys stay.
    """

    def __init__(self, file: str) -> None:
        """Read the file. Raise ValueError with the file's name and the fix if it cannot be used."""
        self.file = Path(file)
        self._stamp, self._keys = self._read()

    def admits(self, key: bytes) -> bool:
        """Return whether the file lists the key, given in Z85."""
        return key in self._keys

    def refresh(self) -> str | None:
        """Read the file again if it changed, and return why it cannot be used, or None if it can."""
        try:
            if self._seen() != self._stamp:
                self._stamp, self._keys = self._read()
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _seen(self) -> tuple[int, ...]:
        status = self.file.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> tuple[tuple[int, ...], frozenset[bytes]]:
        try:
            stamp = self._seen()
            if stamp[2] > MAX_FILE_BYTES:
                raise ValueError(f"{self.file} has {stamp[2]} bytes; at most {MAX_FILE_BYTES} are read")
            text = self.file.read_text(encoding="ascii")
        except UnicodeDecodeError:
            raise ValueError(f"{self.file} is not ASCII; write public keys in Z85, one a line") from None
        except OSError as error:
            raise ValueError(f"cannot read {self.file}: {error.strerror}; name a readable file") from None
        keys = set()
        for number, line in enumerate(text.splitlines(), 1):
            word = line.split(maxsplit=1)[0].encode() if line.strip() else b""
            # A line that begins with `#` may also be a key, as `#` is a character of Z85.
            if KEY.fullmatch(word):
                keys.add(word)
            elif word and not line.lstrip().startswith(COMMENT):
                raise ValueError(f"{self.file} line {number} has no public key: write its 40 characters in Z85")
        return stamp, frozenset(keys)


class ClientGate:
    """A thread that answers libzmq's requests for all sockets of `context`, until `close`.

    The context belongs to the gate alone, because another handler may be in the engine's.
    """

    def __init__(self, clients: ClientList, refused: Callable[[], None], log: ThrottledLog) -> None:
        """Start the thread; it calls `refused` for each client that the list does not have."""
        self._clients = clients
        self._refused = refused
        self._log = log
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self.context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(HANDLER)
        threading.Thread(target=self._run, daemon=True, name="kvrouter-clients").start()

    def close(self) -> None:
        """End the thread; all other sockets of the context must be closed before."""
        self.context.term()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        try:
            status, text = self._judge(frames)
        except Exception as error:
            # Every error is caught, because the next client has to be judged, too.
            self._log.warning(f"clients {type(error).__name__}", "a client could not be judged", error=repr(error))
            status, text = FAILED
        return [VERSION, request_id, status, text, b"", b""]

    def _judge(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        problem = self._clients.refresh()
        if problem is not None:
            self._log.warning("clients file", "the list of clients cannot be used; the former is", problem=problem)
        if len(frames) != REQUEST_FRAMES or frames[0] != VERSION or frames[5] != b"CURVE":
            return REFUSED
        key = z85.encode(frames[6])
        if self._clients.admits(key):
            return ADMITTED
        self._refused()
        self._log.warning(
            "client refused",
            "a client was refused, because the file of public keys does not list its key",
            file=self._clients.file,
            address=frames[3].decode("ascii", "replace"),
            key=key.decode(),
        )
        return REFUSED
