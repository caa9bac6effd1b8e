# SPDX-License-Identifier: Apache-2.0
"""How payloads are checked: XXH3 (64 bits) where the xxhash package is there, as it is beside vLLM, else CRC-32 of
zlib.

Both let other threads run meanwhile. XXH3 costs a fraction of what copying the bytes costs, CRC-32 as much and more (30
and 3 to 6 GB/s measured), and it misses one damage in 2**64 where CRC-32 misses one in 2**32. The name stands in the
identity of a folder: records are never checked by another algorithm than the one they were written with, and a machine
without xxhash has a folder of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

try:
    from xxhash import xxh3_64
except ImportError:
    xxh3_64 = None  # type: ignore[assignment, misc]

Checksum: TypeAlias = Callable[[memoryview], int]

XXH3 = "xxh3_64"
CRC32 = "crc32"


def default_checksum() -> str:
    """The name of the best algorithm of this machine."""
    return CRC32 if xxh3_64 is None else XXH3


def checksum(name: str) -> Checksum:
    """The algorithm of that name: bytes to a number of at most 64 bits. Raises ValueError where it is not there."""
    if name == XXH3 and xxh3_64 is not None:
        return _xxh3
    if name == CRC32:
        return zlib.crc32
    raise ValueError(f"checksum {name!r} is not available: install xxhash for {XXH3!r}, or use {CRC32!r}")


def _xxh3(data: memoryview) -> int:
    # Not the function that does both: up to xxhash 3 it keeps all other threads from running.
    state = xxh3_64()
    state.update(data)
    return state.intdigest()
