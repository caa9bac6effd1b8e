# SPDX-License-Identifier: Apache-2.0
"""The control messages between two engines, about chunks and the slots that may be read. The data goes through NIXL.

A reader opens with `Hello`, and the source answers with `Welcome` or `Refused`. Then the reader sends `Probe` (which
of these chunks do you hold?) and `Borrow` (keep these chunks until I have read them), and ends each loan with `Return`.
In a hand-over it sends `Offer` (which chunks are worth most?) in place of `Probe`; the messages that begin a hand-over
are those of `events/peer/hand_over.py`. Everything is MessagePack, one message a frame, and bounded.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from kvrouter.events.peer.hand_over import Refused, Warm, Warmed, WarmQuery, WarmStop

# Grows with every change that an older engine would misread. Engines of another version do not exchange chunks.
VERSION = 1
# Chunks in one message. A prompt of a million tokens has 62,500 blocks of 16 tokens in each group; a reader that needs
# more sends further messages.
MAX_KEYS = 16_384
# A key has 68 bytes at most, so this holds MAX_KEYS of them.
MAX_MESSAGE_BYTES = 2 << 20
# The longest loan, for a reader that ends without a message.
MAX_LOAN_S = 60.0


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The reader's facts, all of which must be those of the source."""

    version: int
    # The digest of the model, its layout and the naming of blocks (`DiskIdentity.digest`).
    identity: bytes
    # The first parent hash, which depends on the seed of the hashes.
    hash_root: bytes


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The source's answer to a reader whose facts are its own."""

    # The data that NIXL needs to reach the source's memory.
    metadata: bytes
    # The address of the first slot, and the distance from one to the next, in the source's memory.
    base: int
    slot_bytes: int


class Probe(msgspec.Struct, tag="probe", array_like=True):
    """A question for the chunks that can be read now."""

    number: int
    # How often the reader was reset, because chunks of other weights have the same keys.
    resets: int
    keys: list[bytes]


class Present(msgspec.Struct, tag="present", array_like=True):
    """The answer to a `Probe`: for each key whether the chunk can be read now."""

    number: int
    # One byte for each key, 0 or 1.
    held: bytes
    # Why none can be read although the source may hold some: the value of a `PeerMiss`; empty for no such reason.
    reason: str = ""


class Offer(msgspec.Struct, tag="offer", array_like=True):
    """A question for the chunks that are worth most, in a hand-over."""

    number: int
    resets: int
    # The source divides its chunks into `num_shares` shares; the reader fetches the one with the index `share`.
    share: int
    num_shares: int
    # How many chunks of the share the reader knows already.
    skip: int


class Offered(msgspec.Struct, tag="offered", array_like=True):
    """The answer to an `Offer`: the next chunks of the share, the most valuable first."""

    number: int
    # All chunks of the share.
    total: int
    keys: list[bytes]
    # For each key the short hash of the block before it, or 0 if the source does not know it.
    before: list[int]
    # Why none is offered although the source may hold some: the value of a `PeerMiss`; empty for no such reason.
    reason: str = ""


class Borrow(msgspec.Struct, tag="borrow", array_like=True):
    """A request to keep chunks in their slots until they are read."""

    number: int
    resets: int
    # The reader needs the chunks for this long.
    loan_s: float
    keys: list[bytes]
    # Whether that is a use, after which the source keeps the chunks longer; a hand-over is none.
    is_use: bool = True


class Lent(msgspec.Struct, tag="lent", array_like=True):
    """The answer to a `Borrow`: for each key its slot and the checksum of key and content."""

    number: int
    # A negative number is a reason of `MISS_OF_NO_SLOT`.
    slots: list[int]
    checksums: list[int]


class Return(msgspec.Struct, tag="return", array_like=True):
    """The end of a loan."""

    number: int


class Unknown(msgspec.Struct, tag="unknown", array_like=True):
    """The source's answer to a reader that it does not know, because it restarted: say hello first."""

    number: int


ToSource: TypeAlias = Hello | Probe | Offer | Borrow | Return | Warm | WarmQuery | WarmStop
ToReader: TypeAlias = Welcome | Refused | Present | Offered | Lent | Unknown | Warmed

MessageT = TypeVar("MessageT")

_TO_SOURCE = msgspec.msgpack.Decoder(ToSource)
_TO_READER = msgspec.msgpack.Decoder(ToReader)
encode = msgspec.msgpack.Encoder().encode


def read_by_source(frame: bytes) -> ToSource | None:
    """Return a reader's message, or None for anything else."""
    return _read(_TO_SOURCE, frame)


def read_by_reader(frame: bytes) -> ToReader | None:
    """Return a source's message, or None for anything else."""
    return _read(_TO_READER, frame)


def _read(decoder: msgspec.msgpack.Decoder[MessageT], frame: bytes) -> MessageT | None:
    if len(frame) > MAX_MESSAGE_BYTES:
        return None
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
