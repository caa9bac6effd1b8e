# SPDX-License-Identifier: Apache-2.0
"""Which clients the patch's CURVE sockets admit: those whose public keys a file lists.

libzmq asks a socket at a fixed place of its context about every handshake (ZAP, ZMQ RFC 27), in its own thread; it is
answered by a thread of its own here, so neither the engine nor the reporter waits for the file. Without an answer no
handshake ends."""

from __future__ import annotations

import threading
from pathlib import Path

import zmq
from zmq.utils import z85

from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.transport.curve import KEY

HANDLER = "inproc://zeromq.zap.01"
VERSION = b"1.0"
ADMITTED, REFUSED, FAILED = (b"200", b"OK"), (b"400", b"the key is not listed"), (b"500", b"the list failed")
# Of a request: version, id, domain, address, routing id, mechanism, and of CURVE the client's public key.
REQUEST_FRAMES = 7
COMMENT = "#"
# Routers of a fleet are some tens; a larger file is no list of keys.
MAX_FILE_BYTES = 1 << 20


class ClientList:
    """The keys that the file holds, one in Z85 a line; what follows white space is a name. It is read again when it
    changes; a file that cannot be used leaves the former."""

    def __init__(self, file: str) -> None:
        """Raises ValueError with the file's name and the fix."""
        self._file = Path(file)
        self._stamp, self._keys = self._read()

    def admits(self, key: bytes) -> bool:
        return key in self._keys

    def refresh(self) -> str | None:
        """Reads what has changed; returns why it cannot be used."""
        try:
            if self._seen() != self._stamp:
                self._stamp, self._keys = self._read()
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _seen(self) -> tuple[int, ...]:
        found = self._file.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> tuple[tuple[int, ...], frozenset[bytes]]:
        try:
            stamp = self._seen()
            if stamp[2] > MAX_FILE_BYTES:
                raise ValueError(f"{self._file} has {stamp[2]} bytes; at most {MAX_FILE_BYTES} are read")
            text = self._file.read_text(encoding="ascii")
        except UnicodeDecodeError:
            raise ValueError(f"{self._file} is not ASCII; write public keys in Z85, one a line") from None
        except OSError as error:
            raise ValueError(f"cannot read {self._file}: {error.strerror}; name a readable file") from None
        keys = set()
        for number, line in enumerate(text.splitlines(), 1):
            word = line.split(maxsplit=1)[0].encode() if line.strip() else b""
            # `#` is a character of keys, too.
            if KEY.fullmatch(word):
                keys.add(word)
            elif word and not line.lstrip().startswith(COMMENT):
                raise ValueError(f"{self._file} line {number} has no public key: write its 40 characters in Z85")
        return stamp, frozenset(keys)


class ClientGate:
    """Answers until `close`, for all sockets of `context`, which is its own: another handler may be in the engine's."""

    def __init__(self, clients: ClientList, counters: Counters, log: ThrottledLog) -> None:
        self._clients = clients
        self._counters = counters
        self._log = log
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self.context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(HANDLER)
        threading.Thread(target=self._run, daemon=True, name="kvrouter-clients").start()

    def close(self) -> None:
        """Once all other sockets of the context are closed."""
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
            # Whatever it is, the next client has to be judged, too.
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
        self._counters.clients_refused += 1
        self._log.warning(
            "client refused",
            "a client was refused: the file of KVROUTER_PATCH_CURVE_CLIENTS does not list its public key",
            address=frames[3].decode("ascii", "replace"),
            key=key.decode(),
        )
        return REFUSED
