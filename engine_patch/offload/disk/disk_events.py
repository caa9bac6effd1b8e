# SPDX-License-Identifier: Apache-2.0
"""What the disk tier reports to its caller: finished jobs, stored and removed keys, counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.engine_patch.offload.key import OffloadKey

READ = "read"
WRITE = "write"


@dataclass(slots=True)
class Finished:
    """A read or write that is over, so that its slot may be used again. kind: READ or WRITE.

    ok: the slot (a read) or the disk (a write) holds the chunk now. A write that is not ok left nothing behind; a read
    that is not ok left anything in its slot."""

    kind: str
    key: OffloadKey
    slot: int
    ok: bool


class KeyChange(NamedTuple):
    """A key that can be read from now on, or no longer."""

    stored: bool
    key: OffloadKey


@dataclass(slots=True)
class Counters:
    """Since the start. Each only ever grows."""

    written_bytes: int = 0
    read_bytes: int = 0
    # Calls of the system that failed, but for want of space.
    errors: int = 0
    # Writes that found no space.
    full: int = 0
    # Manifest entries found invalid at the start, and records whose entry or payload was damaged when they were read.
    # Of a reader: payloads that do not match their entry.
    corrupt: int = 0
    # Keys that left for others, or for a budget smaller than last time.
    evicted: int = 0
