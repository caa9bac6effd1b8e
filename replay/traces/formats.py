# SPDX-License-Identifier: Apache-2.0
"""The formats that a trace may have, how one is recognised, and the trace from a file."""

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

AUTO = "auto"
# Lines of a log before its first request: a server's start is some hundred.
LINES_TRIED = 10_000
# What is kept of a trace: some 400 bytes a request and 8 a piece, so 1.3 GB at most.
REQUESTS_MAX = 2_000_000
PIECES_MAX = 1 << 26


class Format(NamedTuple):
    """One format. piece_tokens: what an id stands for unless the user says otherwise. recognises: whether this is a
    line of it, given with the object that its JSON is, None where it is none."""

    reader: Reader
    piece_tokens: int
    recognises: Callable[[bytes, dict[str, Any] | None], bool]


def _is_mooncake(line: bytes, found: dict[str, Any] | None) -> bool:
    return found is not None and "hash_ids" in found


def _is_openai(line: bytes, found: dict[str, Any] | None) -> bool:
    if found is None:
        return False
    body = found.get("body", found)
    return isinstance(body, dict) and ("messages" in body or "prompt" in body)


def _is_vllm_log(line: bytes, found: dict[str, Any] | None) -> bool:
    return found is None and (b"Received request " in line or b" details: prompt: " in line)


def _is_access_log(line: bytes, found: dict[str, Any] | None) -> bool:
    return access_log.is_access_line(found)


FORMATS: dict[str, Format] = {
    "access": Format(access_log.read_access_log, ACCESS_PIECE_TOKENS, _is_access_log),
    "mooncake": Format(mooncake.read_mooncake, mooncake.PIECE_TOKENS, _is_mooncake),
    "openai": Format(openai.read_openai, openai.PIECE_TOKENS, _is_openai),
    "vllm": Format(vllm_log.read_vllm_log, openai.PIECE_TOKENS, _is_vllm_log),
}


def recognised(path: Path) -> str:
    """The name of the file's format. Raises TraceError."""
    for number, line in islice(numbered_lines(path), LINES_TRIED):
        found = _json(line)
        for name, form in FORMATS.items():
            if form.recognises(line, found):
                return name
        if found is not None and number == 1 and "logger" not in found:
            break
    raise TraceError(
        f"{path.name} is in none of the known formats ({', '.join(FORMATS)}); docs/how-to/replay.md has their fields, "
        "--format names one"
    )


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_trace(
    path: Path,
    form: str,
    options: ReadOptions | None = None,
    *,
    requests: int = 0,
    on_progress: Progress = lambda _: None,
) -> Trace:
    """All of it, or the first `requests`, in the order of their times, from second 0 on. Raises TraceError."""
    name = recognised(path) if form == AUTO else form
    known = FORMATS[name]
    options = options or ReadOptions(known.piece_tokens)
    found: list[Request] = []
    pieces = 0
    lines = numbered_lines(path, on_progress)
    number = 0

    def counted() -> Any:
        nonlocal number
        for line in lines:
            number = line[0]
            yield line

    for request in islice(known.reader(path, counted(), options), requests or None):
        found.append(request)
        pieces += len(request.pieces)
        if len(found) > REQUESTS_MAX or pieces > PIECES_MAX:
            raise TraceError(
                at(
                    path,
                    number,
                    f"more than {REQUESTS_MAX:,} requests or {PIECES_MAX:,} pieces do not fit; replay the first "
                    f"{len(found) - 1:,} with --requests",
                )
            )
    if not found:
        raise TraceError(f"{path.name} has no requests; is it {name}?")
    found.sort(key=lambda request: request.time_s)
    began_s = found[0].time_s
    for request in found:
        request.time_s -= began_s
    return Trace(path.name, name, options.piece_tokens, found, tuple(options.notes))
