# SPDX-License-Identifier: Apache-2.0
"""The access log of this router (`--access-log on --log-format json`): its lines among those of the whole log.

The trace is exact: lengths and shared prefixes are those of the requests. A line is left out if the router did not know
its prompt's tokens, or refused its request. The line of a list of prompts becomes a request for each prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvrouter.replay.traces.lines import Line, at, json_object, shown, whole_number
from kvrouter.replay.traces.pieces import ID_BITS
from kvrouter.replay.traces.reader import ReadOptions
from kvrouter.replay.traces.request import Request, TraceError
from kvrouter.router.observe.quality.access_log import LOGGER, PIECE_TOKENS


def is_access_line(found: dict[str, Any] | None) -> bool:
    """Return whether a decoded line is one of the access log; `found` is None for a line without a JSON object."""
    return found is not None and found.get("logger") == LOGGER


def read_access_log(path: Path, lines: Iterator[Line], options: ReadOptions) -> Iterator[Request]:
    """Yield the requests of the log. Raises TraceError."""
    if options.piece_tokens != PIECE_TOKENS:
        raise TraceError(f"{path.name}: an access log has pieces of {PIECE_TOKENS} tokens; leave --piece-tokens out")
    for line in lines:
        if not line[1].startswith(b"{"):
            continue
        fields = json_object(path, line)
        if not is_access_line(fields):
            continue
        for prompt in _prompts(path, line[0], fields, options):
            if prompt["pieces"]:
                yield _request(path, line[0], prompt, options)
            else:
                options.note("requests whose prompt's tokens the router did not know are left out")


def _prompts(path: Path, number: int, fields: dict[str, Any], options: ReadOptions) -> list[dict[str, Any]]:
    """Return the line as lines of one prompt each; a list's prompts that the router did not look up are left out."""
    if "prompts" not in fields:
        return [fields | {"pieces": fields.get("pieces") or []}]
    prompts, count = fields["prompts"], whole_number(path, number, fields, "num_prompts", least=2)
    if not isinstance(prompts, list) or not all(isinstance(prompt, list) and len(prompt) == 2 for prompt in prompts):
        raise TraceError(at(path, number, f"prompts is {shown(prompts)}, not a list of lengths and pieces"))
    if len(prompts) < count:
        options.note("prompts of long lists that the router did not look up are left out")
    if fields.get("completion_tokens") is not None:
        generated = whole_number(path, number, fields, "completion_tokens", least=0)
        fields = fields | {"completion_tokens": -(-generated // count)}
    return [fields | {"num_tokens": num_tokens, "pieces": pieces} for num_tokens, pieces in prompts]


def _request(path: Path, number: int, fields: dict[str, Any], options: ReadOptions) -> Request:
    prompt = whole_number(path, number, fields, "num_tokens", least=1)
    pieces = fields["pieces"]
    if not isinstance(pieces, list) or any(type(piece) is not int or not 0 <= piece < 1 << ID_BITS for piece in pieces):
        raise TraceError(at(path, number, f"pieces is {shown(pieces)}, not a list of ids below 2**{ID_BITS}"))
    if len(pieces) != -(-prompt // PIECE_TOKENS):
        raise TraceError(
            at(path, number, f"{prompt} tokens have {-(-prompt // PIECE_TOKENS)} pieces, not {len(pieces)}")
        )
    if fields.get("completion_tokens") is None:
        options.note(f"answers of unknown length are taken to have {options.output_tokens} tokens (--output-tokens)")
        output = options.output_tokens
    else:
        output = whole_number(path, number, fields, "completion_tokens", least=0)
    # A line is written at the end of its request.
    return Request(_began_s(path, number, fields), prompt, output, np.array(pieces, np.uint64))


def _began_s(path: Path, number: int, fields: dict[str, Any]) -> float:
    try:
        ended_s = datetime.fromisoformat(fields["time"]).timestamp()
        took_s = float(fields["e2e_s"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise TraceError(
            at(path, number, f"its time {shown(fields.get('time'))} or e2e_s {shown(fields.get('e2e_s'))} is none")
        ) from None
    if not 0 <= took_s <= ended_s:
        raise TraceError(at(path, number, f"e2e_s is {shown(fields['e2e_s'])}, not seconds from 0"))
    return ended_s - took_s
