# SPDX-License-Identifier: Apache-2.0
"""A checksum of stored values. Redis checks its snapshots, but not the append-only file that follows them. Pure."""

from __future__ import annotations

import zlib

# The length of a checksum as text.
CHECKSUM_BYTES = 8


def checksum(*parts: bytes) -> bytes:
    """Return the CRC-32 of `parts` as 8 hexadecimal digits; the boundaries between the parts count too.

    It recognises damage, not forgery: a program that can write to Redis can also write a checksum. CRC-32 detects every
    change of up to 32 bits in a row.
    """
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, zlib.crc32(b"%d:" % len(part), crc))
    return b"%08x" % crc


def seal(name: str, value: bytes) -> bytes:
    """Return `value` with its checksum appended. The checksum covers `name`, the field in which it is stored, too."""
    return value + checksum(name.encode(), value)


def unseal(name: str, sealed: bytes) -> bytes:
    """Return the value that was passed to `seal`. Raises ValueError if it was changed since."""
    value, stored = sealed[:-CHECKSUM_BYTES], sealed[-CHECKSUM_BYTES:]
    if stored != checksum(name.encode(), value):
        raise ValueError(f"the checksum of {name} is wrong: it was changed where it is stored")
    return value
