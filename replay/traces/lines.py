# SPDX-License-Identifier: Apache-2.0
"""The lines of a trace's file with their numbers, and the reading of fields from a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from kvrouter.replay.traces.request import TraceError

# Longer than the body of any request with text; a body with pictures may be longer.
LINE_BYTES_MAX = 64 << 20

# The most tokens of a prompt or an answer.
TOKENS_MAX = 1 << 24

Line: TypeAlias = tuple[int, bytes]
Progress: TypeAlias = Callable[[int], None]


def numbered_lines(path: Path, on_progress: Progress = lambda size: None) -> Iterator[Line]:
    """Yield every line that is not empty, with its number in the file from 1. Raises TraceError.

    `on_progress` is called with the bytes of each line, empty ones included.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(at(path, number, f"the line is longer than {LINE_BYTES_MAX >> 20} MiB"))
                on_progress(len(line))
                if stripped := line.strip():
                    yield number, stripped
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}; name a readable file") from None


def at(path: Path, number: int, problem: str) -> str:
    """Return a message that names the file and the line."""
    return f"{path.name} line {number}: {problem}"


def json_object(path: Path, line: Line) -> dict[str, Any]:
    """Decode a line that must be a JSON object. Raises TraceError."""
    number, raw = line
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise TraceError(at(path, number, "is nested too deeply")) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(at(path, number, f"is not JSON ({error}); each line is one JSON object")) from None
    if not isinstance(value, dict):
        raise TraceError(at(path, number, "is not a JSON object; each line is one"))
    return value


def whole_number(path: Path, number: int, found: Mapping[str, Any], name: str, *, least: int) -> int:
    """Return a field that counts something, between `least` and TOKENS_MAX. Raises TraceError."""
    value = found.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= TOKENS_MAX:
        raise TraceError(at(path, number, f"{name} is {shown(value)}, not a whole number from {least} to {TOKENS_MAX}"))
    return value


def shown(value: object) -> str:
    """Return a value for a message, at most 40 characters of it."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
