# SPDX-License-Identifier: Apache-2.0
"""The content codings in which a request's body may arrive (RFC 9110, 8.4), and their decoder. Pure.

zlib and the zstd library decompress. This module gives them a body piece by piece, so that a small body that decodes to
a huge one ends at the limit, with no more memory than the limit and no more time than it takes to get there.
"""

from __future__ import annotations

import math
import sys
import zlib
from enum import StrEnum

from kvrouter.router.base.common.errors import BadQuestion, CutBody, TooLarge, WrongCoding
from kvrouter.router.base.common.escaping import printable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# zlib reads gzip with this window, and checks the length and the checksum at its end.
GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS
# RFC 9659 bounds the window of the content coding zstd to 8 MiB, which a decoder must keep in memory.
MAX_ZSTD_WINDOW_LOG = 23
# The bytes that are given to a library at once, and those that it returns at once.
INPUT_BYTES = 64 * 1024
OUTPUT_BYTES = 256 * 1024
# A body may be several gzip members or zstd frames (RFC 1952, 2.2; RFC 8878, 3.1), as bgzip and pzstd write it. bgzip
# has one for each 64 KiB, so 32 MiB have 512. An empty member has 20 bytes, a frame 9, and each costs a new decompressor.
MAX_MEMBERS = 1_024
# A new decompressor takes as long as this many decoded bytes.
MEMBER_COST_BYTES = 4_096
# The number of characters of a client's coding that an error shows.
SHOWN_CHARS = 80
# The error of the zstd library for a window over the bound.
WINDOW_ERROR = "too much memory"


class ContentCoding(StrEnum):
    """A coding that is decoded."""

    GZIP = "gzip"
    ZSTD = "zstd"
    # The body as it is. Clients should not send this name, but some do.
    IDENTITY = "identity"


ACCEPTED = ", ".join(ContentCoding)
# RFC 9110, 8.4.1.3: x-gzip means gzip.
_CODINGS = {coding.encode(): coding for coding in ContentCoding} | {
    b"": ContentCoding.IDENTITY,
    b"x-gzip": ContentCoding.GZIP,
}


def coding_of(encoding: bytes) -> ContentCoding:
    """Return the coding that the value of a Content-Encoding header names. Raises WrongCoding for all others."""
    coding = _CODINGS.get(encoding.strip(b" \t").lower())
    if coding is None:
        shown = printable(encoding[:SHOWN_CHARS].decode("latin-1"))
        raise WrongCoding(
            f"the body's Content-Encoding is {shown!r}, and this router decodes one of {ACCEPTED}: send the body in one of these",
            accepted=ACCEPTED,
        )
    return coding


class _GzipMember:
    """One member of a gzip body, with the interface of a `ZstdDecompressor`."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(GZIP_WINDOW_BITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        """Whether the member has ended."""
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        """The bytes after the member's end."""
        return self._inflater.unused_data

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        """Return up to `max_length` bytes. `data` must be empty unless `needs_input`."""
        inflater = self._inflater
        decoded = inflater.decompress(data or inflater.unconsumed_tail, max_length)
        self.needs_input = not inflater.unconsumed_tail and len(decoded) < max_length
        return decoded


def _member(coding: ContentCoding) -> _GzipMember | zstd.ZstdDecompressor:
    """Return the decompressor of one gzip member or zstd frame."""
    if coding is ContentCoding.GZIP:
        return _GzipMember()
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_ZSTD_WINDOW_LOG})


class BodyDecoder:
    """The decoder of one complete body in gzip or zstd. `run` decodes a part, and `whole` all of it."""

    def __init__(self, coding: ContentCoding, encoded: bytes | bytearray, limit_bytes: int) -> None:
        """Begin with a body. `limit_bytes` is the largest size of the decoded body."""
        self._coding = coding
        self._encoded = memoryview(encoded)
        self._limit_bytes = limit_bytes
        # The number of bytes that were given to a decompressor.
        self._at = 0
        self._member = _member(coding)
        self._members = 1
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def run(self, budget_bytes: float) -> bool:
        """Read and decode about `budget_bytes`, and return whether the whole body is decoded.

        Raises BadQuestion if the body cannot be decoded, and TooLarge if it is over the limit.
        """
        while budget_bytes > 0:
            if self._member.eof:
                self._at -= len(self._member.unused_data)
                if self._at == len(self._encoded):
                    return True
                self._begin_member()
                budget_bytes -= MEMBER_COST_BYTES
            budget_bytes -= self._step()
        return False

    def whole(self) -> bytes:
        """Decode the rest, and return the decoded body. Raises the errors of `run`."""
        self.run(math.inf)
        return b"".join(self._pieces)

    def _begin_member(self) -> None:
        """Begin with the member that follows the one that has ended."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise self._malformed(f"has over {MAX_MEMBERS} members; compress it as one")
        self._member = _member(self._coding)

    def _step(self) -> int:
        """Decode a piece of the member, and return the number of bytes that were read and decoded."""
        piece: bytes | memoryview = b""
        if self._member.needs_input:
            piece = self._encoded[self._at : self._at + INPUT_BYTES]
            self._at += len(piece)
            if not piece:
                raise CutBody(
                    f"the {self._coding} body ends too early, as its last bytes are missing; send the whole of it",
                    code="malformed_encoding",
                )
        try:
            decoded = self._member.decompress(piece, OUTPUT_BYTES)
        except (zlib.error, zstd.ZstdError) as error:
            raise self._undecodable(str(error)) from None
        self._size_bytes += len(decoded)
        if self._size_bytes > self._limit_bytes:
            raise TooLarge(
                f"the decoded body is over the limit of {self._limit_bytes} bytes; send less, or raise max_body_bytes of the router"
            )
        self._pieces.append(decoded)
        return len(piece) + len(decoded)

    def _undecodable(self, cause: str) -> BadQuestion:
        """Return the error for the decompressor's own one."""
        if WINDOW_ERROR in cause:
            return self._malformed("needs a window over 8 MiB (RFC 9659); compress it with a smaller one")
        if self._members > 1:
            return self._malformed(
                f"has bytes after its end that are not another member ({cause}); send it without them"
            )
        return self._malformed(f"cannot be decoded ({cause}); compress it again, or send it plain")

    def _malformed(self, problem: str) -> BadQuestion:
        return BadQuestion(f"the {self._coding} body {problem}", code="malformed_encoding")
