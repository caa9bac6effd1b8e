# SPDX-License-Identifier: Apache-2.0
"""The heartbeat that each router process writes to Redis several times a second. Pure.

A heartbeat contains no time: a reader judges by its own clock when it last saw the count change. A heartbeat contains
everything that its router follows, so one heartbeat is enough for a judgement; its cost grows with the workers, not
with the changes. A value that is not a complete heartbeat, whichever program wrote it, is ignored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 2

# A router's token has 16 characters; a heartbeat of a router with a thousand workers has some 40 KB.
MAX_TOKEN_BYTES = 128
MAX_HEARTBEAT_BYTES = 4 * 1024**2

# A change that waits for the store for longer than this is late; a commit takes some milliseconds.
LATE_MS = 1_000

Number = Annotated[int, msgspec.Meta(ge=0)]


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """One worker that a router follows, and how much of the router's knowledge of it is in the store."""

    # The number of the lease.
    lease: Number
    # The number of the worker's last log entry that is in the store, as far as the router knows.
    commits: Number
    # The age of the oldest change that is not in the store yet; 0 if all are.
    waits_ms: Number = 0


class Heartbeat(msgspec.Struct, frozen=True):
    """One router's report of itself. Workers are named by `keys.worker_tag`."""

    # A number that differs in each heartbeat.
    count: Number
    version: Number
    # The workers that the router follows.
    holds: dict[str, Hold]
    # The workers that the router will not follow, with the reason of each.
    refuses: dict[str, str]
    # The router's version.
    software: str = ""
    # The settings that must be the same at all routers (`model/config/agreement.py`).
    settings: dict[str, str] = {}
    # The count of the last heartbeat that the store had confirmed when this one was made. Routers of older versions do not
    # say it.
    confirmed: Number | None = None

    @property
    def after(self) -> int:
        """The count of a heartbeat that had reached the store when this one was made."""
        return self.count - 1 if self.confirmed is None else self.confirmed


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Heartbeat)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Return the heartbeat as it is stored."""
    return _encoder.encode(heartbeat)


def decode_heartbeat(token: bytes, value: bytes) -> tuple[str, Heartbeat] | None:
    """Return the router's token and its heartbeat, or None if the value is no heartbeat of this version.

    Args:
        token: The token of the router that wrote the value.
        value: The stored value.
    """
    if not 0 < len(token) <= MAX_TOKEN_BYTES or len(value) > MAX_HEARTBEAT_BYTES:
        return None
    try:
        name, heartbeat = token.decode("ascii"), _decoder.decode(value)
    except (UnicodeDecodeError, msgspec.MsgspecError):
        return None
    return (name, heartbeat) if name.isprintable() and heartbeat.version == VERSION else None
