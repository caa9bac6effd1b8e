# SPDX-License-Identifier: Apache-2.0
"""The decoding of compressed request bodies, in one place for all doors: the HTTP API, the proxy and the picker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from kvrouter.router.base.common.content_coding import BodyDecoder, ContentCoding, coding_of
from kvrouter.router.base.common.errors import BadQuestion, TooLarge, WrongCoding
from kvrouter.router.base.common.json_arrays import LONG_BODY_BYTES
from kvrouter.router.base.common.tally import CounterSeries

# The outcomes of a body with a content coding: it was decoded; the coding is not accepted; the decoded body is over
# the limit; the body is cut, broken, or followed by other bytes.
DECODED, UNSUPPORTED, TOO_LARGE, BROKEN = OUTCOMES = ("decoded", "unsupported", "too_large", "broken")


class BodyDecoding:
    """The decoder of the bodies of all requests, which counts them by outcome."""

    def __init__(self, limit_bytes: int, counts: Mapping[str, CounterSeries]) -> None:
        # The largest size of a decoded body.
        self._limit_bytes = limit_bytes
        self._counts = counts

    def refusal(self, encoding: bytes) -> WrongCoding | None:
        """Return why a body with this Content-Encoding is refused before it is read, or None if it is not."""
        try:
            self._coding_of(encoding)
        except WrongCoding as error:
            return error
        return None

    def count(self, outcomes: Iterable[str]) -> None:
        """Count the outcomes of bodies."""
        for outcome in outcomes:
            self._counts[outcome].inc()

    def _coding_of(self, encoding: bytes) -> ContentCoding:
        """Return the coding that a Content-Encoding names. Raises WrongCoding, and counts it."""
        try:
            return coding_of(encoding)
        except WrongCoding:
            self.count([UNSUPPORTED])
            raise

    async def decoded(self, encoding: bytes, body: bytes | bytearray) -> bytes:
        """Return the body without its content coding, and count the outcome. A long body is decoded in a thread.

        Raises the errors of `decode`.
        """
        outcomes: list[str] = []
        try:
            return await self.decode(encoding, body, outcomes)
        finally:
            self.count(outcomes)

    async def decode(self, encoding: bytes, body: bytes | bytearray, outcomes: list[str]) -> bytes:
        """Return the body without its content coding, and append the outcome instead of counting it.

        Raises WrongCoding if the coding is not accepted, which is counted, TooLarge if the decoded body is over the
        limit, and BadQuestion if it cannot be decoded.
        """
        coding = self._coding_of(encoding)
        # Some clients name a coding in requests that have no body.
        if coding is ContentCoding.IDENTITY or not body:
            return bytes(body)
        decoder = BodyDecoder(coding, body, self._limit_bytes)
        try:
            # A short body may decode to a long one. It is known to be long once this much of it is decoded.
            decoded = decoder.whole() if decoder.run(LONG_BODY_BYTES) else await asyncio.to_thread(decoder.whole)
        except TooLarge:
            outcomes.append(TOO_LARGE)
            raise
        except BadQuestion:
            outcomes.append(BROKEN)
            raise
        outcomes.append(DECODED)
        return decoded
