# SPDX-License-Identifier: Apache-2.0
"""The checksums of payloads: XXH3 (64 bits) if the xxhash package is installed, as beside vLLM, else zlib's CRC-32.

Both let other threads run meanwhile. XXH3 costs a fraction of copying the bytes, CRC-32 as much and more (30 and 3 to 6
GB/s measured). XXH3 misses one damage in 2**64, CRC-32 one in 2**32. The algorithm's name stands in the identity of a
folder: records are never checked by another algorithm than the one they were written with, and a machine without xxhash
has its own folder.
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
    """Return the name of the best algorithm of this machine."""
    return CRC32 if xxh3_64 is None else XXH3


def checksum(name: str) -> Checksum:
    """Return the algorithm of that name, which turns bytes into a number of at most 64 bits.

    Raises ValueError if the algorithm is not available here.
    """
    if name == XXH3 and xxh3_64 is not None:
        return _xxh3
    if name == CRC32:
        return zlib.crc32
    raise ValueError(f"checksum {name!r} is not available: install xxhash for {XXH3!r}, or use {CRC32!r}")


def _xxh3(data: memoryview) -> int:
    # The one-call function is avoided: up to xxhash 3 it blocks all other threads.
    state = xxh3_64()
    state.update(data)
    return state.intdigest()
