# SPDX-License-Identifier: Apache-2.0
"""The items that a subscriber yields: batches in order, and every fact about what is missing or proven. Values only.

`GapLost`, `ReadAnew` and `Restarted` void everything that the consumer knows; anything missing is announced by one of
them before the next `Batch`. From `FellBehind` to `CaughtUp` the publisher has sent more than the batches yielded so
far. All seqs are of the life that the surrounding items describe.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

import msgspec

from kvrouter.events.transport.progress import CaughtUp, FellBehind

# Both ends of a payload: a batch begins with its time to the microsecond and its first events, and ends with its last
# ones. All of a large payload would cost a tenth of decoding it.
FINGERPRINTED_BYTES = 512


def fingerprint(payload: bytes) -> int:
    """64 bits that distinguish batches with the same seq: BLAKE2b over its length, its head and its tail."""
    digest = hashlib.blake2b(payload[:FINGERPRINTED_BYTES], digest_size=8)
    if len(payload) > FINGERPRINTED_BYTES:
        digest.update(payload[-FINGERPRINTED_BYTES:])
        digest.update(len(payload).to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big")


class ResumePoint(msgspec.Struct, frozen=True):
    """The last batch that a consumer has stored. incomplete: `Incomplete` followed it."""

    seq: int
    fingerprint: int
    incomplete: bool = False


class Connected(msgspec.Struct, frozen=True):
    """The live socket has a peer."""


class Disconnected(msgspec.Struct, frozen=True):
    """The live socket lost its peer; ZMQ keeps trying to connect."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch, undecoded; in order, exactly once in each life of the publisher."""

    seq: int
    payload: bytes
    fingerprint: int
    replayed: bool


class GapOpened(msgspec.Struct, frozen=True):
    """Batches first_seq up to next_seq - 1 are missing; a replay is requested and live batches are held."""

    first_seq: int
    next_seq: int


class GapClosed(msgspec.Struct, frozen=True):
    """The replay returned all of them, as Batches before this item: nothing was lost."""

    first_seq: int
    next_seq: int


class GapLost(msgspec.Struct, frozen=True):
    """They are lost. first_seq == next_seq: possibly nothing is missing, but that cannot be proven."""

    first_seq: int
    next_seq: int
    reason: str


class Incomplete(msgspec.Struct, frozen=True):
    """Earlier batches were given up only because the replay endpoint did not answer; all is read again when it
    does."""


class ReadAnew(msgspec.Struct, frozen=True):
    """A replay endpoint that did not answer when batches were lost answers again: its whole ring follows."""


class Restarted(msgspec.Struct, frozen=True):
    """Presumably another life of the publisher. last_seq is the last of the old life, seq the first seen of the new
    one, or the next expected where that is unknown."""

    last_seq: int
    seq: int
    reason: str


class Proven(msgspec.Struct, frozen=True):
    """After a resume or a reconnect, proof that the publisher's life is the one of batch `seq`, the last one known."""

    seq: int
    # `next_seq` exists only without a replay endpoint: the next seq came, which another life can reach accidentally.
    how: Literal["replay", "next_seq"]


class ReplayFailed(msgspec.Struct, frozen=True):
    """The replay endpoint does not answer; until it does, gaps are lost."""

    reason: str


class Malformed(msgspec.Struct, frozen=True):
    """A message that is not (topic, seq of 8 bytes, payload); it was dropped."""

    reason: str


class Flooded(msgspec.Struct, frozen=True):
    """A connection brought more than it may and was closed."""

    # A sentence with the endpoint.
    reason: str
    # Whether it was the stream's own connection, so that `Disconnected` follows, or an answer's.
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
    | ReadAnew
    | Restarted
    | Proven
    | ReplayFailed
    | Malformed
    | Flooded
)
