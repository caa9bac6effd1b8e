# SPDX-License-Identifier: Apache-2.0
"""Traces as the Mooncake project publishes them: one JSON object a line.

A line has timestamp (ms), input_length, output_length (tokens), hash_ids, and session_id if its author knew the
conversation. In Mooncake's traces one id stands for 512 tokens (kvcache-ai/Mooncake, FAST25-release/traces); others use
the same form with other sizes, which `--piece-tokens` sets. Lengths and shared prefixes are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvrouter.replay.traces.lines import Line, at, json_object, shown, whole_number
from kvrouter.replay.traces.pieces import ID_BITS, session_number
from kvrouter.replay.traces.reader import ReadOptions
from kvrouter.replay.traces.request import Request, TraceError

PIECE_TOKENS = 512
# The year 2286 in milliseconds; a larger number cannot be a time.
MILLISECONDS_MAX = 1e13


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int | str | None = None


_decode = msgspec.json.Decoder(_Row).decode


def read_mooncake(path: Path, lines: Iterator[Line], options: ReadOptions) -> Iterator[Request]:
    """Yield the requests of the trace. Raises TraceError."""
    size = options.piece_tokens
    for line in lines:
        row = _row(path, line)
        number = line[0]
        lengths = {"input_length": row.input_length, "output_length": row.output_length}
        prompt = whole_number(path, number, lengths, "input_length", least=1)
        output = whole_number(path, number, lengths, "output_length", least=0)
        if not 0 <= row.timestamp <= MILLISECONDS_MAX:
            raise TraceError(at(path, number, f"timestamp is {shown(row.timestamp)}, not milliseconds from 0"))
        needed = -(-prompt // size)
        if len(row.hash_ids) < needed:
            raise TraceError(
                at(
                    path,
                    number,
                    f"{prompt} tokens need {needed} hash_ids of {size} tokens, not {len(row.hash_ids)}; "
                    "--piece-tokens says how many tokens one stands for",
                )
            )
        if row.hash_ids and not 0 <= min(row.hash_ids) <= max(row.hash_ids) < 1 << ID_BITS:
            raise TraceError(at(path, number, f"hash_ids has one that is not from 0 to 2**{ID_BITS} - 1"))
        session = None if row.session_id is None else session_number(row.session_id)
        yield Request(row.timestamp / 1000, prompt, output, np.array(row.hash_ids, np.uint64), session)


def _row(path: Path, line: Line) -> _Row:
    try:
        return _decode(line[1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        json_object(path, line)
        raise TraceError(
            at(path, line[0], f"is no request of a Mooncake trace ({error}); see docs/how-to/replay.md for its fields")
        ) from None
