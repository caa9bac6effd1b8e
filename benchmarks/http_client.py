# SPDX-License-Identifier: Apache-2.0
"""A keep-alive HTTP/1.1 client on one raw socket, which does as little work as possible, the same for every server."""

from __future__ import annotations

import json
import socket
import ssl
from typing import Any

TIMEOUT_S = 30.0


class HttpClient:
    """One connection to a server on 127.0.0.1.

    Every answer must have a content-length, which is checked.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._port = port
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="127.0.0.1")

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """Encode a request, which may be sent any number of times."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return the status and the body of its answer; a chunked body is returned as it came."""
        self._socket.sendall(request)
        data = self._socket.recv(65_536)
        while (split := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head = data[:split].lower()
        at = head.find(b"content-length: ")
        if b"transfer-encoding: chunked" in head:
            while not data.endswith(b"0\r\n\r\n"):
                data += self._more()
            return int(head[9:12]), data[split + 4 :]
        if at < 0:
            raise ValueError(f"no content-length in the answer: {head!r}")
        end = head.find(b"\r", at)
        length = split + 4 + int(head[at + 16 : end if end >= 0 else None])
        while len(data) < length:
            data += self._more()
        return int(head[9:12]), data[split + 4 : length]

    def _more(self) -> bytes:
        part = self._socket.recv(65_536)
        if not part:
            raise ConnectionError("the server closed the connection")
        return part

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the decoded answer; raise RuntimeError unless the status is a 2xx."""
        status, content = self.send(self.request(method, path, body))
        if not 200 <= status < 300:
            raise RuntimeError(f"{method} {path}: {status} {content[:300]!r}")
        return json.loads(content) if content else None

    def close(self) -> None:
        self._socket.close()
