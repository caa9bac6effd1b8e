# SPDX-License-Identifier: Apache-2.0
"""Keys of CURVE, libzmq's encryption, for both sides: read from files, and set on sockets.

No secret is ever shown, not even a wrong one.
"""

from __future__ import annotations

import re
from pathlib import Path

import zmq

# 32 bytes in Z85, as `zmq.curve_keypair()` returns them. Source: ZMQ RFC 32.
KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def read_secret(file: str) -> bytes:
    """Return the secret key in `file`. Raises ValueError with the file's name and the fix."""
    try:
        content = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot read the CURVE key in {file}: {error.strerror}; name a readable file") from None
    if not KEY.fullmatch(content):
        raise ValueError(f"{file} holds no CURVE key: write the 40 characters of the secret key of zmq.curve_keypair()")
    return content


def public_key(secret: bytes) -> str:
    """Return the public key of a secret one."""
    return zmq.curve_public(secret).decode()


class CurveClient:
    """The keys of a client's sockets.

    `server` is the public key that the server must prove. `secret` is the client's own key, by which a server with a
    list of clients knows it. If `secret` is None, each connection uses a new key, which only servers without a list
    admit.
    """

    __slots__ = ("_secret", "server")

    def __init__(self, server: str, secret: bytes | None = None) -> None:
        self.server = server
        self._secret = secret

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys on a socket, before it connects."""
        secret = zmq.curve_keypair()[1] if self._secret is None else self._secret
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
