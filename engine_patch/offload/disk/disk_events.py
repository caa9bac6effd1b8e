# SPDX-License-Identifier: Apache-2.0
"""The reports of the disk tier to its caller: finished jobs, stored and removed keys, counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.engine_patch.offload.key import OffloadKey

READ = "read"
WRITE = "write"


@dataclass(slots=True)
class Finished:
    """A read or write that has ended, so that its slot may be used again.

    A write that is not ok left nothing on the disk; a read that is not ok left anything in its slot.
    """

    # READ or WRITE.
    kind: str
    key: OffloadKey
    slot: int
    # Whether the slot (after a read) or the disk (after a write) holds the chunk now.
    ok: bool


class KeyChange(NamedTuple):
    """A key that can be read from now on, or no longer."""

    stored: bool
    key: OffloadKey


@dataclass(slots=True)
class Counters:
    """Counts since the start, which only grow."""

    written_bytes: int = 0
    read_bytes: int = 0
    # System calls that failed for another reason than lack of space.
    errors: int = 0
    # Writes that found no space.
    full: int = 0
    # Manifest entries found invalid at the start, and records whose entry or payload was damaged when they were read.
    # For a reader: payloads that do not match their entry.
    corrupt: int = 0
    # Keys that were evicted for others, or for a budget smaller than last time.
    evicted: int = 0
