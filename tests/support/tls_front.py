# SPDX-License-Identifier: Apache-2.0
"""A TLS proxy in front of a port, like a gateway's: it forwards the decrypted bytes unchanged."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from typing import Self

PIECE_BYTES = 65_536


class TlsFront:
    """A proxy in its own thread, from entry to exit, which forwards to a port of this machine."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._behind = port
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._connected, args=(connection,), daemon=True).start()

    def _connected(self, connection: socket.socket) -> None:
        """Forward in both directions until one side closes, or the client rejects the certificate."""
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(connection, server_side=True) as client,
            socket.create_connection(("127.0.0.1", self._behind)) as behind,
        ):
            while True:
                ready = [client] if client.pending() else select.select([client, behind], [], [])[0]
                for source in ready:
                    data = source.recv(PIECE_BYTES)
                    if not data:
                        return
                    (behind if source is client else client).sendall(data)
