# SPDX-License-Identifier: Apache-2.0
"""The formats of traces, how each is recognised, and the reading of a trace from a file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvrouter.replay.traces import access_log, mooncake, openai, vllm_log
from kvrouter.replay.traces.lines import Progress, at, numbered_lines
from kvrouter.replay.traces.reader import Reader, ReadOptions
from kvrouter.replay.traces.request import Request, Trace, TraceError
from kvrouter.router.observe.quality.access_log import PIECE_TOKENS as ACCESS_PIECE_TOKENS
from kvrouter.router.route.tokens.client_body import PROMPT_FIELDS

AUTO = "auto"
# The most lines of a log that are read in search of its first request: a server's start takes some hundred.
LINES_TRIED = 10_000
# Limits of a trace in memory: some 400 bytes a request and 8 a piece, so 1.3 GB at most.
REQUESTS_MAX = 2_000_000
PIECES_MAX = 1 << 26


class Format(NamedTuple):
    """One format of traces."""

    reader: Reader
    # Tokens that an id stands for by default.
    piece_tokens: int
    # Returns whether a line has this format, by the line and its JSON object; None if it has no JSON object.
    recognises: Callable[[bytes, dict[str, Any] | None], bool]


def _is_mooncake(line: bytes, fields: dict[str, Any] | None) -> bool:
    return fields is not None and "hash_ids" in fields


def _is_openai(line: bytes, fields: dict[str, Any] | None) -> bool:
    if fields is None:
        return False
    body = fields.get("body", fields)
    return isinstance(body, dict) and not body.keys().isdisjoint(("messages", *PROMPT_FIELDS))


def _is_vllm_log(line: bytes, fields: dict[str, Any] | None) -> bool:
    return fields is None and (b"Received request " in line or b" details: prompt: " in line)


FORMATS: dict[str, Format] = {
    "access": Format(
        access_log.read_access_log, ACCESS_PIECE_TOKENS, lambda _, fields: access_log.is_access_line(fields)
    ),
    "mooncake": Format(mooncake.read_mooncake, mooncake.PIECE_TOKENS, _is_mooncake),
    "openai": Format(openai.read_openai, openai.PIECE_TOKENS, _is_openai),
    "vllm": Format(vllm_log.read_vllm_log, openai.PIECE_TOKENS, _is_vllm_log),
}


def recognised(path: Path) -> str:
    """Return the name of the file's format. Raises TraceError."""
    for number, line in islice(numbered_lines(path), LINES_TRIED):
        fields = _json(line)
        for name, form in FORMATS.items():
            if form.recognises(line, fields):
                return name
        if fields is not None and number == 1 and "logger" not in fields:
            break
    raise TraceError(
        f"{path.name} is in none of the known formats ({', '.join(FORMATS)}); docs/how-to/replay.md has their fields, "
        "--format names one"
    )


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_trace(
    path: Path,
    form: str,
    options: ReadOptions | None = None,
    *,
    requests: int = 0,
    on_progress: Progress = lambda _: None,
) -> Trace:
    """Read all requests, or the first `requests`, ordered by time from second 0 on. Raises TraceError."""
    name = recognised(path) if form == AUTO else form
    trace_format = FORMATS[name]
    options = options or ReadOptions(trace_format.piece_tokens)
    arrivals: list[Request] = []
    pieces = 0
    lines = numbered_lines(path, on_progress)
    number = 0

    def counted() -> Any:
        nonlocal number
        for line in lines:
            number = line[0]
            yield line

    for request in islice(trace_format.reader(path, counted(), options), requests or None):
        arrivals.append(request)
        pieces += len(request.pieces)
        if len(arrivals) > REQUESTS_MAX or pieces > PIECES_MAX:
            raise TraceError(
                at(
                    path,
                    number,
                    f"more than {REQUESTS_MAX:,} requests or {PIECES_MAX:,} pieces do not fit; replay the first "
                    f"{len(arrivals) - 1:,} with --requests",
                )
            )
    if not arrivals:
        raise TraceError(f"{path.name} has no requests; is it {name}?")
    arrivals.sort(key=lambda request: request.time_s)
    began_s = arrivals[0].time_s
    for request in arrivals:
        request.time_s -= began_s
    return Trace(path.name, name, options.piece_tokens, arrivals, tuple(options.notes))
