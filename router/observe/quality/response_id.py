# SPDX-License-Identifier: Apache-2.0
"""A reader of the id of a response, at the beginning of the answer of `/v1/responses`. Pure: bytes in, id out.

A plain answer is the response; the first event of a stream (`response.created`) contains it. The id is its first field
in vLLM 0.33.0 and SGLang 0.5.23; short fields before it are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

# The part of an answer in which the id must be complete. No known engine sends anything long before it.
MAX_HEAD_BYTES = 16_384

_EVENT_DATA = re.compile(r"(?:^|[\r\n])data:")
_SPACE = re.compile(r"[ \t\r\n]*")
_decode_value = json.JSONDecoder().raw_decode


class ResponseIdReader:
    """The reader of one answer: `feed` it from the first byte on until it has ended."""

    __slots__ = ("_found", "_head", "_missed", "_streams")

    def __init__(self, found: Callable[[str], None], missed: Callable[[], None], *, streams: bool) -> None:
        """Create a reader.

        Args:
            found: Called with the id.
            missed: Called instead if the beginning of the answer has no id.
            streams: Whether the answer consists of events.
        """
        self._found = found
        self._missed = missed
        self._streams = streams
        self._head = b""

    def feed(self, parts: list[bytes]) -> bool:
        """Take the next bytes, and return whether the reader has ended."""
        self._head += b"".join(parts)[: MAX_HEAD_BYTES - len(self._head)]
        text = self._head.decode("utf-8", "ignore")
        try:
            response_id = _id_in(text, self._streams)
        except _Incomplete:
            if len(self._head) < MAX_HEAD_BYTES:
                return False
            response_id = None
        if response_id is None:
            self._missed()
        else:
            self._found(response_id)
        return True


class _Incomplete(Exception):
    """A text that ends before its id is complete."""


def _id_in(text: str, streams: bool) -> str | None:
    """Return the id in the beginning of an answer, or None if it has none. Raises _Incomplete."""
    start = 0
    if streams:
        event = _EVENT_DATA.search(text)
        if event is None:
            raise _Incomplete
        start = _field(text, event.end(), "response")
        if start < 0:
            return None
    start = _field(text, start, "id")
    if start < 0:
        return None
    value = _value(text, start)[0]
    return value if isinstance(value, str) else None


def _field(text: str, start: int, name: str) -> int:
    """Return where the value of a field of the object at `start` begins, or -1. Raises _Incomplete."""
    at = _after_space(text, start)
    if text[at] != "{":
        return -1
    at = _after_space(text, at + 1)
    while text[at] == '"':
        key, at = _value(text, at)
        at = _after_space(text, at)
        if text[at] != ":":
            return -1
        at = _after_space(text, at + 1)
        if key == name:
            return at
        at = _after_space(text, _value(text, at)[1])
        if text[at] != ",":
            return -1
        at = _after_space(text, at + 1)
    return -1


def _value(text: str, start: int) -> tuple[object, int]:
    """Return the value at `start`, and the place after it. Raises _Incomplete."""
    try:
        return _decode_value(text, start)
    except (ValueError, RecursionError):
        # An invalid value looks like one that is cut. Reading ends at the limit of the head in both cases.
        raise _Incomplete from None


def _after_space(text: str, start: int) -> int:
    """Return the place of the next character that is no space. Raises _Incomplete if there is none yet."""
    space = _SPACE.match(text, start)
    assert space is not None
    if space.end() == len(text):
        raise _Incomplete
    return space.end()
