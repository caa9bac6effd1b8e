# SPDX-License-Identifier: Apache-2.0
"""An engine's events about its KV blocks, decoded: stored, removed, cleared.

A block hash is an unsigned 64-bit number. The wire also has 16- and 32-byte digests (reduced to their last 8 bytes,
big-endian, as vLLM itself does for its integer form) and negative 64-bit numbers (read as two's complement).

Messages hold no positions: vLLM omits the hashes of masked blocks but not their tokens, so only the hash identifies a
block. They are values: this module does no I/O, counts no copies and does not depend on workers.
Source: vLLM 0.32.0 distributed/kv_events.py.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

HashArray: TypeAlias = npt.NDArray[np.uint64]

GPU = "GPU"

# The errors of decoding hostile bytes: msgspec's errors are ValueErrors only since msgspec 0.22, UnicodeDecodeError is
# one, deep nesting is a RecursionError, and numbers beyond int64 in token ids are an OverflowError.
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)

# The most characters of an error's text, which goes into a log line.
MAX_ERROR_CHARS = 200

# Media, owners and kinds become keys and labels, so a longer name is damage.
MAX_NAME_CHARS = 256


class BlockStored(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Blocks that became resident. There is one event for each physical copy, so the same hash may come again.

    Events are compared by identity, as arrays have no single truth value.
    """

    # (n,) native uint64; n may be 0.
    block_hashes: HashArray
    parent_block_hash: int | None
    # In tokens; 0 in the offloading connector's placeholders.
    block_size: int
    # Upper case; an absent medium is "GPU".
    medium: str
    # None stands for the one group of an engine that names none; it is never group 0.
    group_idx: int | None = None
    # kv_cache_spec_kind, lower case.
    kind: str | None = None
    # In tokens.
    sliding_window: int | None = None
    # "LOCAL" or "REMOTE", relative to the publisher.
    locality: str | None = None
    # The secondary tier that sent the event, if one did.
    ownership: str | None = None
    lora_name: str | None = None
    # One entry for each block, untagged; decoded only with tokens.
    extra_keys: tuple[Any, ...] | None = None
    # (m,) int64; decoded only on request.
    token_ids: npt.NDArray[np.int64] | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Blocks that lost one physical copy each."""

    block_hashes: HashArray
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The loss of every block. Stock vLLM names neither medium nor group; None means that the field was absent."""

    medium: str | None = None
    group_idx: int | None = None


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class BrokenEvent(msgspec.Struct, frozen=True):
    """One event that could not be decoded. `tag` is its type; None if not even the type was readable."""

    tag: str | None
    error: str


class EventBatch(msgspec.Struct, frozen=True, eq=False):
    """The events of one engine step, in the engine's order. Broken and unknown ones are not in `events`."""

    # Seconds since 1970, by the engine's clock.
    ts: float
    events: list[Event]
    dp_rank: int | None = None
    broken: list[BrokenEvent] = []
    # How many events had a type that this version does not have.
    unknown: int = 0
