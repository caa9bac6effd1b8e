# SPDX-License-Identifier: Apache-2.0
"""Bodies in the content codings that the router decodes, and short bodies that decode to very long ones."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable
from functools import partial

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": partial(gzip.compress, mtime=0),
    "zstd": zstd.compress,
    "identity": bytes,
}
CODINGS = ("gzip", "zstd")

# A window of 16 MiB, in a frame whose size is not stated, since a decoder needs no more than a stated size.
WIDE_WINDOW: dict[int, int] = {zstd.CompressionParameter.window_log: 24, zstd.CompressionParameter.content_size_flag: 0}


def wide_zstd(body: bytes) -> bytes:
    """Return the body in a zstd frame whose window is 16 MiB."""
    compressor = zstd.ZstdCompressor(options=WIDE_WINDOW)
    return compressor.compress(body) + compressor.flush()


def bomb(coding: str, size_bytes: int) -> bytes:
    """Return a short body that decodes to this many zeros, without ever holding them."""
    zeros = bytes(1024**2)
    compressor = (
        zlib.compressobj(9, wbits=31)
        if coding == "gzip"
        else zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 20})
    )
    pieces = [compressor.compress(zeros) for _ in range(size_bytes // len(zeros))]
    return b"".join([*pieces, compressor.flush()])
