# SPDX-License-Identifier: Apache-2.0
"""The items that a subscriber yields: batches in order, and every fact about what is missing or proven. Values only.

`GapLost`, `RingReread` and `Restarted` void everything that the consumer knows; anything missing is announced by one of
them before the next `Batch`. From `FellBehind` to `CaughtUp` the publisher has sent more than the batches yielded so
far. All seqs belong to the life that the surrounding items describe.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

import msgspec

from kvrouter.events.transport.progress import CaughtUp, FellBehind

# The size of each end of a payload that is hashed. A batch begins with its time to the microsecond and its first
# events, and ends with its last ones. Hashing all of a large payload would cost a tenth of decoding it.
FINGERPRINTED_BYTES = 512


def fingerprint(payload: bytes) -> int:
    """Return 64 bits that distinguish batches with the same seq: BLAKE2b over the length, the head and the tail."""
    digest = hashlib.blake2b(payload[:FINGERPRINTED_BYTES], digest_size=8)
    if len(payload) > FINGERPRINTED_BYTES:
        digest.update(payload[-FINGERPRINTED_BYTES:])
        digest.update(len(payload).to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big")


class ResumePoint(msgspec.Struct, frozen=True):
    """The last batch that a consumer has stored."""

    seq: int
    fingerprint: int
    # Whether `Incomplete` followed the batch.
    incomplete: bool = False


class Connected(msgspec.Struct, frozen=True):
    """A connection of the live socket to its peer."""


class Disconnected(msgspec.Struct, frozen=True):
    """The loss of the live socket's peer; ZMQ keeps trying to connect."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch, undecoded. Batches come in order, each exactly once in a life of the publisher."""

    seq: int
    payload: bytes
    fingerprint: int
    replayed: bool


class GapOpened(msgspec.Struct, frozen=True):
    """A gap: batches first_seq up to next_seq - 1 are missing. A replay is requested, and live batches are held."""

    first_seq: int
    next_seq: int


class GapClosed(msgspec.Struct, frozen=True):
    """A gap without a loss: the replay returned all its batches, which were yielded before this item."""

    first_seq: int
    next_seq: int


class GapLost(msgspec.Struct, frozen=True):
    """The loss of batches first_seq up to next_seq - 1.

    If first_seq == next_seq, possibly no batch is missing, but that cannot be proven.
    """

    first_seq: int
    next_seq: int
    reason: str


class Incomplete(msgspec.Struct, frozen=True):
    """A loss of earlier batches only because the replay endpoint did not answer.

    All batches are read again when it does.
    """


class RingReread(msgspec.Struct, frozen=True):
    """The replay endpoint answers again. It was silent when batches were lost, so all batches of its buffer follow."""


class Restarted(msgspec.Struct, frozen=True):
    """The presumed start of another life of the publisher."""

    # The last seq of the old life.
    last_seq: int
    # The first seq seen of the new life, or the next expected one if that is not known.
    seq: int
    reason: str


class Proven(msgspec.Struct, frozen=True):
    """A proof, after a resume or a reconnect, that the publisher's life is that of batch `seq`, the last known one."""

    seq: int
    # How it was proven: `replay`, the replay endpoint returned the known batch; or `next_seq`, used only if there is no
    # replay endpoint: the batch with the next seq came. The latter is weaker, because a restarted engine may happen to
    # reach the same seq.
    how: Literal["replay", "next_seq"]


class ReplayFailed(msgspec.Struct, frozen=True):
    """A replay endpoint that does not answer. Until it does, every gap is lost."""

    reason: str


class Malformed(msgspec.Struct, frozen=True):
    """A message that was not (topic, seq of 8 bytes, payload), and was dropped."""

    reason: str


class Flooded(msgspec.Struct, frozen=True):
    """A connection that brought more bytes than it may, and was closed."""

    # A sentence that names the endpoint.
    reason: str
    # Whether it was the stream's own connection, so that `Disconnected` follows, or that of an answer.
    is_live: bool


StreamItem: TypeAlias = (
    Connected
    | Disconnected
    | FellBehind
    | CaughtUp
    | Batch
    | GapOpened
    | GapClosed
    | GapLost
    | Incomplete
    | RingReread
    | Restarted
    | Proven
    | ReplayFailed
    | Malformed
    | Flooded
)
