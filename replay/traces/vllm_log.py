# SPDX-License-Identifier: Apache-2.0
"""The log of a vLLM server that runs with `--enable-log-requests`.

This format was read in vllm/entrypoints/logger.py of vLLM 0.19.1, 0.20.2 and 0.22.1 (installed) and of its main branch
of 2026. A request is two lines, the first only with VLLM_LOGGING_LEVEL=DEBUG:

    DEBUG 11-24 10:00:00 [logger.py:52] Request ID details: prompt: 'text', prompt_token_ids: [1, 2], ...
    INFO 11-24 10:00:00 [logger.py:63] Received request ID: params: SamplingParams(..., max_tokens=16, ...), ...

Newer versions add the prompt to the second line with `--enable-log-request-prompts`, cut to 4,096 characters or 512
ids; older ones had both in one line. With `--enable-log-outputs`, a third line has the answer's tokens:

    INFO 11-24 10:00:01 [logger.py:85] Generated response ID: output: 'text', output_token_ids: [3], ...

A request is exact if its line has prompt_token_ids; text alone is estimated as in openai.py. Times have whole seconds
and no year, so the requests of one second are spread evenly over it. `--max-log-len` cuts prompts, which the log does
not show. Lines of any other kind are skipped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvrouter.replay.traces.lines import TOKENS_MAX, Line, at
from kvrouter.replay.traces.pieces import pieces_of_tokens
from kvrouter.replay.traces.reader import ReadOptions
from kvrouter.replay.traces.request import Request, TraceError

STRING = r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
ENTRY = re.compile(
    r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)\S* \[[^\]]*\] "
    r"(?:(?P<details>Request) (?P<d_id>\S+) details: |Received request (?P<id>\S+): "
    r"|Generated response (?P<g_id>\S+?)(?P<stream> \(streaming \w+\))?: )"
)
PROMPT = re.compile(rf"(?<![\w])prompt: ({STRING})")
TOKENS = re.compile(r"(?<![\w])prompt_token_ids: (\[[\d, ]*\])")
TOKEN = re.compile(r"\d{1,18}")
OUTPUT = re.compile(r"output_token_ids: (?:array\([^[]*)?(\[[\d, ]*\])")
MAX_TOKENS = re.compile(r"\bmax_tokens=(\d{1,12})\b")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The most of a prompt that an INFO line has, unless --max-log-len sets another limit.
INFO_TOKENS, INFO_CHARACTERS = 512, 4096
# The limit of requests whose prompt came without their params, and of answers awaited: more than run at a time.
OPEN_MAX = 65_536
# A log of December continues in January.
HALF_A_YEAR_S = 182 * 86_400
YEAR_S = 365 * 86_400


def read_vllm_log(path: Path, lines: Iterator[Line], options: ReadOptions) -> Iterator[Request]:
    """Yield the requests of the log. Raises TraceError, also for a log whose requests have no prompts."""
    details: dict[str, str] = {}
    answers: dict[str, Request] = {}
    clock = _Clock()
    second: list[Request] = []
    complete = without = 0
    for number, raw in lines:
        text = COLOUR.sub("", raw.decode("utf-8", "replace"))
        entry = ENTRY.search(text)
        if entry is None:
            continue
        rest = text[entry.end() :]
        if entry["details"]:
            _keep(details, entry["d_id"], rest)
            continue
        if entry["g_id"]:
            answered = answers.pop(entry["g_id"], None)
            tokens = OUTPUT.search(rest)
            if answered is not None and tokens is not None and not (entry["stream"] or "").endswith("delta)"):
                answered.output_tokens = tokens[1].count(",") + 1
            continue
        time_s = clock.seconds(path, number, entry["time"])
        if second and second[0].time_s != time_s:
            yield from _spread(second)
            second = []
        prompt = details.pop(entry["id"], None)
        request = _request(prompt if prompt is not None else rest, rest, time_s, options, whole=prompt is not None)
        if request is None:
            without += 1
            continue
        complete += 1
        second.append(request)
        _keep(answers, entry["id"], request)
    yield from _spread(second)
    if without and not complete:
        raise TraceError(
            f"{path.name} has {without} requests and no prompt: run vLLM with --enable-log-requests and "
            "VLLM_LOGGING_LEVEL=DEBUG"
        )
    if without:
        options.note(f"{without} requests without a prompt in the log are left out")


def _keep(open_entries: dict[str, Any], name: str, value: Any) -> None:
    open_entries[name] = value
    if len(open_entries) > OPEN_MAX:
        del open_entries[next(iter(open_entries))]


def _request(prompt: str, params: str, time_s: float, options: ReadOptions, *, whole: bool) -> Request | None:
    """Return the request; None if the log has no prompt for it."""
    string = PROMPT.search(prompt)
    # The text of a prompt must not be mistaken for fields of the log.
    around = prompt if string is None else prompt[: string.start()] + prompt[string.end() :]
    limit = MAX_TOKENS.search(params if whole else around)
    output = min(int(limit[1]), TOKENS_MAX) if limit else options.output_tokens
    options.note(
        "answers are taken to be as long as max_tokens where the log does not have them"
        if limit
        else f"answers of unknown length are taken to have {options.output_tokens} tokens (--output-tokens)"
    )
    if (ids := TOKENS.search(around)) is not None and TOKEN.search(ids[1]):
        tokens = np.array([int(token) for token in TOKEN.findall(ids[1])], np.int64)
        if not whole and len(tokens) == INFO_TOKENS:
            options.note(f"prompts of {INFO_TOKENS} tokens may be cut: INFO lines have no more of them")
        return Request(time_s, len(tokens), output, pieces_of_tokens(tokens, options.piece_tokens))
    if string is None:
        return None
    try:
        text = str(ast.literal_eval(string[1]))
    except (ValueError, SyntaxError, MemoryError):
        return None
    if not whole and len(text) == INFO_CHARACTERS:
        options.note(f"prompts of {INFO_CHARACTERS} characters may be cut: INFO lines have no more of them")
    body = {"prompt": text, "add_special_tokens": False}
    pieces, count, _ = options.pieces_of_prompt("text", body, lambda: text)
    return Request(time_s, count, output, pieces)


def _spread(requests: list[Request]) -> Iterator[Request]:
    """Yield the requests of one second, spread evenly over it."""
    for place, request in enumerate(requests):
        request.time_s += place / len(requests)
        yield request


class _Clock:
    """A clock for times without a year, whose seconds continue over New Year."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._years = 0

    def seconds(self, path: Path, number: int, text: str) -> float:
        """Return the seconds of a time as vLLM logs it. Raises TraceError."""
        try:
            # 2000 is a leap year, so 29 February is valid.
            moment = datetime.strptime(f"2000-{text}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        except ValueError:
            raise TraceError(at(path, number, f"{text!r} is no time as vLLM logs it")) from None
        if moment < self._last_s - HALF_A_YEAR_S:
            self._years += 1
        self._last_s = moment
        return moment + self._years * YEAR_S
