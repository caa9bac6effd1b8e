# SPDX-License-Identifier: Apache-2.0
"""The secret key of the patch's sockets, where they speak CURVE (libzmq's encryption). Never shown, not even a wrong
one.

Clients that know the matching public key may connect: the key proves the engine to routers and keeps others out; libzmq
needs no list of clients.
"""

from __future__ import annotations

import re
from pathlib import Path

# 32 bytes in Z85, as `zmq.curve_keypair()` gives them. Source: ZMQ RFC 32.
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def read_secret(file: str) -> bytes:
    """The key in `file`. Raises ValueError with the file's name and the fix."""
    try:
        content = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot read the CURVE key in {file}: {error.strerror}; name a readable file") from None
    if not _KEY.fullmatch(content):
        raise ValueError(f"{file} holds no CURVE key: write the 40 characters of the secret key of zmq.curve_keypair()")
    return content
