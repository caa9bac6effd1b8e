# SPDX-License-Identifier: Apache-2.0
"""What each router process says of itself in Redis, several times a second. Pure.

It carries no time: a reader judges by its own clock when it last saw the count change. It carries all that its router
follows, so that one alone is enough to judge by; its cost grows with the workers, not with what changed. Whatever is
not a heartbeat in full, by whoever it was written, is none.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1

# A token is 16 characters of our own; a heartbeat of a router with a thousand workers is some 40 KB.
MAX_TOKEN_BYTES = 128
MAX_HEARTBEAT_BYTES = 4 * 1024**2

Number = Annotated[int, msgspec.Meta(ge=0)]


class Heartbeat(msgspec.Struct, frozen=True):
    """One router's word. Workers are named as by `keys.worker_tag`.

    count: another one each time. holds: the workers that it follows, with the number of each lease. late: those of them
    of which the store lacks what it learned more than a second ago. refuses: workers that it will not follow, and
    why. software: its version. settings: its settings that must be the same at all (`config/agreement.py`)."""

    count: Number
    version: Number
    holds: dict[str, Number]
    late: list[str]
    refuses: dict[str, str]
    software: str = ""
    settings: dict[str, str] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Heartbeat)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    return _encoder.encode(heartbeat)


def decode_heartbeat(token: bytes, value: bytes) -> tuple[str, Heartbeat] | None:
    """The router's token and what it says; None: this is no heartbeat."""
    if not 0 < len(token) <= MAX_TOKEN_BYTES or len(value) > MAX_HEARTBEAT_BYTES:
        return None
    try:
        name, heartbeat = token.decode("ascii"), _decoder.decode(value)
    except (UnicodeDecodeError, msgspec.MsgspecError):
        return None
    return (name, heartbeat) if name.isprintable() and heartbeat.version == VERSION else None
