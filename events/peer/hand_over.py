# SPDX-License-Identifier: Apache-2.0
"""The messages of a hand-over: an engine is to fetch from another the chunks that are worth most there.

They go to the socket at which an engine lends its chunks, and may come from everyone who may connect there: with keys,
whoever is listed. An engine answers each of them with `Warmed` or `Refused`, so the sender polls with `WarmQuery`.
Everything is MessagePack, one message a frame.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

# A message of a hand-over is smaller; the answer to an unknown one may quote it.
MAX_HAND_OVER_BYTES = 16_384
# The reason of a `Refused` while another hand-over is under way.
BUSY = "busy"
# The longest hand-over, so that no mistake keeps an engine fetching for hours.
MAX_WITHIN_S = 3_600.0
# More engines than share one cache; the source makes that many lists of its keys.
MAX_SHARES = 256


class WarmEnd(StrEnum):
    """The reason why a hand-over ended. The other ends are the values of a `PeerMiss`, such as "gone" or "layout"."""

    # It is not over.
    NONE = ""
    # All chunks of the share are here.
    COMPLETE = "complete"
    # The bytes are used up.
    BYTES = "bytes"
    # The time is over.
    TIME = "time"
    # Further chunks would displace chunks that are worth more here.
    ROOM = "room"
    STOPPED = "stopped"
    # The engine ends.
    CLOSED = "closed"


class Warm(msgspec.Struct, tag="warm", array_like=True):
    """A request to fetch a share of the chunks that another engine holds, the most valuable first."""

    # A random number that names the hand-over.
    number: int
    # The address at which the source lends.
    host: str
    port: int
    # The source divides its chunks into `num_shares` shares; this engine fetches the one with the index `share`.
    share: int
    num_shares: int
    max_bytes: int
    within_s: float


class WarmQuery(msgspec.Struct, tag="warm_query", array_like=True):
    """A question for the progress of a hand-over."""

    number: int


class WarmStop(msgspec.Struct, tag="warm_stop", array_like=True):
    """A request to end a hand-over; chunks that have arrived stay."""

    number: int


class Warmed(msgspec.Struct, tag="warmed", array_like=True):
    """The state of a hand-over. Counts are in chunks unless noted."""

    number: int
    # A `WarmEnd`, or the value of a `PeerMiss`; empty while the hand-over goes on.
    end: str
    # The chunks of the share, 0 while that is not known.
    offered: int
    fetched: int
    fetched_bytes: int
    # Offered chunks that were here already.
    present: int
    # Chunks that were requested and did not come.
    missed: int
    # Chunks that made room.
    evicted: int


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The answer to a message that the engine does not serve."""

    # The value of a `PeerMiss`.
    reason: str
    # A sentence for the log.
    detail: str


HandOverRequest: TypeAlias = Warm | WarmQuery | WarmStop
HandOverReply: TypeAlias = Warmed | Refused

encode = msgspec.msgpack.Encoder().encode
_REPLY = msgspec.msgpack.Decoder(HandOverReply)


def read_reply(frame: bytes) -> HandOverReply | None:
    """Return an engine's answer, or None for anything else."""
    try:
        reply: HandOverReply = _REPLY.decode(frame)
        return reply
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
