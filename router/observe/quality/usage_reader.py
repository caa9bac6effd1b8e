# SPDX-License-Identifier: Apache-2.0
"""Finds an engine's usage report in its answer as it passes. Pure: bytes in, numbers out.

No event is decoded. The bytes after each key `usage` are kept, a few candidates at most, and the last one that is a
usage counts, since an answer may have others: a tool's schema, one in every event. It does not matter where the bytes
are cut. Text within the answer cannot be taken for the key, because its quotes are escaped; a stream's comments can,
and are passed over. This module is compiled, see `setup.py`.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvrouter.router.route.tokens.proxied_paths import USAGE_KEY

# The start of a line with data in a stream; lines of comments and pings have none.
EVENT = b"\ndata:"
# vLLM's usage has some hundred bytes; with one number for each turn of a tool's conversation, some thousand.
MAX_USAGE_BYTES = 4_096
# How many of the last objects under such a key are kept. The tools of a Responses answer come before its usage, and
# nothing after it.
MAX_CANDIDATES = 4
# Enough to recognise a cut key, a cut line and the end of the last event with its line ends: `data: [DONE]` of OpenAI's
# streams, `data: {"type":"message_stop"}` of Anthropic's.
TAIL_BYTES = 16
DONE = (b"[DONE]", b'message_stop"}')
# An engine that fails within a stream reports it in an event, and ends the stream as if it were complete. Source: vLLM
# 0.32.0 entrypoints/generate/base/serving.py (create_streaming_error_response); SGLang has the same form.
ERROR_EVENT = b'\ndata: {"error"'
# The part of an error event that is kept; an engine's error may contain a whole field of a request.
MAX_ERROR_BYTES = 4_096
# A line of a stream that begins with this is a comment, as keep-alive messages are.
COMMENT = b":"
_LINE_END = ord("\n")
# Quotes within the message are escaped.
_SERVER_ERROR = re.compile(rb'(?<!\\)"code": ?5\d\d\b')
# More tokens than a prompt can have: not a real count.
MAX_TOKENS = 2**40

_decoder = json.JSONDecoder()
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The usage that an engine reports, in tokens; None: not reported."""

    prompt_tokens: int
    completion_tokens: int | None = None
    # Tokens of the prompt that were not computed again.
    cached_tokens: int | None = None


class UsageReader:
    """The reader of one answer: `feed` it in order, then read `usage` and `events`."""

    def __init__(self, *, streams: bool, key: bytes = USAGE_KEY) -> None:
        """Create a reader.

        Args:
            streams: Whether the answer has events to count.
            key: The key of the usage, with its quotes; at most TAIL_BYTES long.
        """
        self._streams = streams
        self._key = key
        # A stream's first line has no line end before it.
        self._tail = b"\n"
        # Whether the line that the next bytes continue is a comment, unless its beginning is in the tail.
        self._in_comment = False
        self._begun = 0
        # The bytes after the last key, up to MAX_USAGE_BYTES, and those after the keys before it.
        self._value: bytearray | None = None
        self._candidates: deque[bytearray] = deque(maxlen=MAX_CANDIDATES)
        # The bytes after the last error event.
        self._error: bytearray | None = None

    def feed(self, parts: list[bytes]) -> int:
        """Take the next bytes, and return how many events of a stream begin in them."""
        tail = self._tail
        fresh = len(tail)
        window = tail + (parts[0] if len(parts) == 1 else b"".join(parts))
        size = len(window)
        name = self._key
        key = window.find(name, max(0, fresh - len(name) + 1))
        while key >= 0:
            end = key + len(name)
            if not (self._streams and self._is_comment(window, key)):
                self._keep(window, fresh, key)
                self._settle()
                self._value, fresh = bytearray(), end
            key = window.find(name, end)
        self._keep(window, fresh, size)
        # Indexes count from the start, because this module is compiled without negative ones.
        self._tail = window[max(0, size - TAIL_BYTES) :]
        if not self._streams:
            return 0
        if window[size - 1] != _LINE_END:
            self._in_comment = self._is_comment(window, size)
        events = window.count(EVENT, max(0, len(tail) - len(EVENT) + 1))
        self._begun += events
        # Search from the end: it takes half the time in an event of some hundred bytes.
        error = window.rfind(ERROR_EVENT, max(0, len(tail) - len(ERROR_EVENT) + 1))
        if error >= 0:
            self._error = bytearray(window[error + len(ERROR_EVENT) :][:MAX_ERROR_BYTES])
        elif self._error is not None:
            self._error += window[len(tail) :][: MAX_ERROR_BYTES - len(self._error)]
        return events

    def _is_comment(self, window: bytes, at: int) -> bool:
        """Return whether the line of a stream before index `at` of the window is a comment."""
        start = window.rfind(b"\n", 0, at) + 1
        return window.startswith(COMMENT, start) if start else self._in_comment

    def _keep(self, window: bytes, start: int, end: int) -> None:
        value = self._value
        if value is not None and (room := MAX_USAGE_BYTES - len(value)) > 0 and end > start:
            value += window[start : min(end, start + room)]

    def _settle(self) -> None:
        value = self._value
        # Some engines write `"usage": null` into every event, which must not replace an object.
        if value is not None and value[:TAIL_BYTES].lstrip(b" \t\r\n:").startswith(b"{"):
            self._candidates.append(value)
        self._value = None

    @property
    def events(self) -> int:
        """The number of events with data so far, without the one that only ends the stream."""
        return max(0, self._begun - self.done)

    @property
    def done(self) -> bool:
        """Whether a stream has announced its end."""
        return self._streams and self._tail.rstrip().endswith(DONE)

    @property
    def failed(self) -> bool:
        """Whether the last error in a stream is the engine's, judged by its code."""
        return self._error is not None and _SERVER_ERROR.search(self._error) is not None

    def usage(self) -> Usage | None:
        """Return the last usage in the answer; None if there is none."""
        self._settle()
        for value in reversed(self._candidates):
            if (usage := _usage(bytes(value))) is not None:
                return usage
        return None


def _usage(value: bytes) -> Usage | None:
    if (decoded := _plain_object(value)) is not None:
        return usage_of(decoded)
    text = value.decode("utf-8", "replace")
    try:
        decoded, _ = _decoder.raw_decode(text, text.index("{"))
    except (ValueError, RecursionError):
        return None
    return usage_of(decoded)


def _plain_object(value: bytes) -> Mapping[str, Any] | None:
    """Return the object at the start of `value` if it ends with the brace that balances its braces; None otherwise.

    That is nearly always the case, since only a text within the object could contain an unbalanced brace.
    """
    start = value.find(b"{")
    end = value.find(b"}", start) + 1
    while end and value.count(b"{", start, end) > value.count(b"}", start, end):
        end = value.find(b"}", end) + 1
    if not end:
        return None
    try:
        return _decode_object(value[start:end])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def usage_of(counts: Mapping[str, Any]) -> Usage | None:
    """Return a decoded usage object as `Usage`; None if it counts no tokens of a prompt."""
    # The Responses API and Anthropic's name them input and output.
    prompt_tokens = _tokens(counts.get("prompt_tokens", counts.get("input_tokens")))
    if prompt_tokens is None:
        return None
    completion_tokens = _tokens(counts.get("completion_tokens", counts.get("output_tokens")))
    read_tokens = _tokens(counts.get("cache_read_input_tokens"))
    if read_tokens is not None:
        # Anthropic's input tokens are those that were neither read from the cache nor counted as written to it.
        created_tokens = _tokens(counts.get("cache_creation_input_tokens")) or 0
        prompt_tokens += read_tokens + created_tokens
        return Usage(prompt_tokens, completion_tokens, read_tokens) if prompt_tokens else None
    if not prompt_tokens:
        return None
    details = counts.get("prompt_tokens_details", counts.get("input_tokens_details"))
    # The meta_info of SGLang's /generate has cached_tokens beside the other counts.
    place = details if isinstance(details, dict) else counts
    return Usage(prompt_tokens, completion_tokens, _tokens(place.get("cached_tokens")))


def _tokens(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_TOKENS else None
