# SPDX-License-Identifier: Apache-2.0
"""Block hashes from their MessagePack bytes to native uint64 arrays, without a Python number for each hash.

vLLM's hashes are uniformly spread, so nearly every integer takes MessagePack's 9-byte form and nearly every digest the
same length: an array of them is a table with a fixed row width, which numpy reads at once. An array of another form (a
hash below 2**32, mixed forms) is decoded one hash at a time. Pure functions; results never refer to the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvrouter.events.vllm.messages import HashArray

MASK_64 = (1 << 64) - 1

# A digest shorter than the integer form cannot be reduced to it.
MIN_DIGEST_BYTES = 8

# Row width in bytes -> layout of a row, and the markers that prove it. 0xCF uint64 and 0xD3 int64 carry the same eight
# bytes; 0xC4 is a binary of up to 255 bytes, and its length follows. Digests have 16 bytes (xxh3-128) or 32 (SHA-256).
_ROWS: dict[int, tuple[np.dtype[np.void], tuple[int, ...]]] = {
    9: (np.dtype([("marker", "u1"), ("hash", ">u8")]), (0xCF, 0xD3)),
    18: (np.dtype([("marker", ">u2"), ("head", "V8"), ("hash", ">u8")]), (0xC410,)),
    34: (np.dtype([("marker", ">u2"), ("head", "V24"), ("hash", ">u8")]), (0xC420,)),
}

_slow_decoder = msgspec.msgpack.Decoder(list[int | bytes])


def reduce_hash(value: int | bytes) -> int:
    """Return the 64-bit form of a hash. Raises ValueError for a digest of fewer than 8 bytes."""
    if isinstance(value, int):
        return value & MASK_64
    if len(value) < MIN_DIGEST_BYTES:
        raise ValueError(f"a block hash of {len(value)} bytes: expected 16 or 32")
    return int.from_bytes(value[-8:], "big")


def parse_hashes(raw: msgspec.Raw) -> HashArray:
    """Return the hashes of one encoded array. Raises ValueError (or RecursionError) if it is no array of hashes."""
    parsed = parse_many([raw])
    if parsed is not None:
        return parsed[0]
    return np.array([reduce_hash(value) for value in _slow_decoder.decode(raw)], dtype=np.uint64)


def parse_many(raws: Sequence[msgspec.Raw]) -> list[HashArray] | None:
    """Return the hashes of many msgpack arrays in one pass, or None unless all hashes are encoded in one known length.

    The results are slices of one array, which is cheap for events with a single hash each, as vLLM's removals are.
    """
    width = 0
    counts: list[int] = []
    bodies: list[bytes] = []
    for raw in raws:
        data = bytes(raw)
        first = data[0]
        if first & 0xF0 == 0x90:
            count, start = first & 0x0F, 1
        elif first == 0xDC:
            count, start = (data[1] << 8) | data[2], 3
        elif first == 0xDD:
            count, start = int.from_bytes(data[1:5], "big"), 5
        else:
            return None
        counts.append(count)
        if count == 0:
            continue
        row, rest = divmod(len(data) - start, count)
        if rest or (width and row != width):
            return None
        width = row
        bodies.append(data[start:])
    if width == 0:
        return [np.empty(0, dtype=np.uint64) for _ in counts]
    if width not in _ROWS:
        return None
    layout, markers = _ROWS[width]
    rows = np.frombuffer(b"".join(bodies), dtype=layout)
    row_markers = rows["marker"]
    is_marked = row_markers == markers[0]
    for marker in markers[1:]:
        is_marked |= row_markers == marker
    if not is_marked.all():
        return None
    flat: HashArray = rows["hash"].astype(np.uint64)
    if len(counts) == 1:
        return [flat]
    result = []
    start = 0
    for count in counts:
        result.append(flat[start : start + count])
        start += count
    return result
