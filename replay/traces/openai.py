# SPDX-License-Identifier: Apache-2.0
"""Bodies of OpenAI's API with the times at which they came, one JSON object a line.

A line is the body itself (`messages` of a chat, or the `prompt` of a completion: text, token ids, or a list of either;
also `token_ids` of vLLM's /inference/v1/generate, and `input_ids` or `text` of SGLang's /generate) or has it under
`body`, as the Batch API's files do. The line also has a time (`timestamp`, `time`, `created_at` or `created`: seconds,
milliseconds or nanoseconds, or ISO 8601) and, if they are known, `usage` or `meta_info` (also under `response`) and
`session_id`. Without a `session_id`, also in the body, the body's `user` names the session.

A line with a list of prompts becomes a request for each of them, all at the same time and each placed on its own; the
router places them together. The generated tokens of `usage` are divided among them.

Token ids are exact. Text goes through the given tokenizer with its chat template, as this router's own tokenizer reads
it (docs/explanation/tokens.md). Without a tokenizer, a chat is written out as roles and texts and counted as
`bytes_per_token` bytes a token: shared prefixes are right to the piece, and the number of tokens is an estimate. If
lines have `usage`, a note says how far off the estimate is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvrouter.replay.traces.lines import Line, at, json_object, shown, whole_number
from kvrouter.replay.traces.pieces import pieces_of_tokens, session_number
from kvrouter.replay.traces.reader import ReadOptions
from kvrouter.replay.traces.request import Request, TraceError
from kvrouter.router.base.common.timestamps import TIME_FIELDS, seconds_of, time_in
from kvrouter.router.route.tokens.client_body import PROMPT_FIELDS

PIECE_TOKENS = 16
# An estimate that is off by less than this share is not worth a note.
OFF_SHARE = 0.1


def read_openai(path: Path, lines: Iterator[Line], options: ReadOptions) -> Iterator[Request]:
    """Yield the requests of the file. Raises TraceError."""
    estimated = stated = text_bytes = 0
    for line in lines:
        number = line[0]
        fields = json_object(path, line)
        body = fields.get("body", fields)
        if not isinstance(body, dict):
            raise TraceError(at(path, number, f"body is {shown(body)}, not a JSON object"))
        time_s = _time_s(path, number, fields, body)
        usage = _usage(fields)
        prompts = _prompts(path, number, body)
        output = _output_tokens(path, number, body, usage, len(prompts), options)
        session = _session(path, number, fields, body)
        for prompt in prompts:
            request, size = _request(path, number, body, prompt, time_s, output, options)
            request.session = session
            yield request
            if size and len(prompts) == 1 and isinstance(count := usage.get("prompt_tokens"), int) and count > 0:
                estimated += request.prompt_tokens
                stated += count
                text_bytes += size
    if stated and abs(estimated - stated) > OFF_SHARE * stated:
        options.note(
            f"usage counts {stated:,} prompt tokens where the estimate has {estimated:,}: "
            f"try --bytes-per-token {text_bytes / stated:.2f}, or --tokenizer FOLDER"
        )


def _request(
    path: Path, number: int, body: dict[str, Any], prompt: Any, time_s: float, output: int, options: ReadOptions
) -> tuple[Request, int]:
    """Return the request, and the bytes of text from which its tokens were estimated; 0 if they are exact."""
    if isinstance(prompt, list) and body.get("messages") is not prompt:
        tokens = _token_ids(path, number, prompt)
        return Request(time_s, len(tokens), output, pieces_of_tokens(tokens, options.piece_tokens)), 0
    if prompt is body.get("messages"):
        pieces, count, size = options.pieces_of_prompt("chat", body, lambda: chat_text(path, number, body))
    else:
        pieces, count, size = options.pieces_of_prompt("text", body | {"prompt": prompt}, lambda: str(prompt))
    return Request(time_s, count, output, pieces), size


def chat_text(path: Path, number: int, body: Mapping[str, Any]) -> str:
    """Return a chat as text: tools first, then each message with its role, so that a next turn begins with this text.

    Parts that are not text become JSON. Raises TraceError.
    """
    parts = []
    if tools := body.get("tools"):
        parts.append(msgspec.json.encode(tools).decode())
    for message in body["messages"]:
        if not isinstance(message, dict):
            raise TraceError(at(path, number, f"messages has {shown(message)}, not a message with role and content"))
        content = message.get("content")
        if not isinstance(content, str):
            items = content if isinstance(content, list) else []
            content = "\n".join(_part_text(part) for part in items)
        calls = message.get("tool_calls")
        parts.append(f"<{message.get('role')}>\n{content}{msgspec.json.encode(calls).decode() if calls else ''}\n")
    return "\n".join(parts)


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return msgspec.json.encode(part).decode()


def _prompts(path: Path, number: int, body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a body, each as text, token ids, or its messages. Raises TraceError."""
    messages = body.get("messages")
    prompt = next((body[name] for name in PROMPT_FIELDS if body.get(name) is not None), None)
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            raise TraceError(at(path, number, f"messages is {shown(messages)}, not a list of messages"))
        return [messages]
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) or (isinstance(item, list) and item) for item in prompt):
            return list(prompt)
    raise TraceError(at(path, number, f"has no messages, and its prompt is {shown(prompt)}: text or token ids"))


def _token_ids(path: Path, number: int, prompt: list[Any]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 62 for token in prompt):
        raise TraceError(at(path, number, "prompt has what is no token id: whole numbers from 0"))
    return np.array(prompt, np.int64)


def _time_s(path: Path, number: int, fields: Mapping[str, Any], body: Mapping[str, Any]) -> float:
    value = time_in(fields, body)
    try:
        # Only differences count, so a missing time zone does not matter.
        return seconds_of(value)
    except ValueError:
        if isinstance(value, str):
            raise TraceError(at(path, number, f"its time {shown(value)} is neither a number nor ISO 8601")) from None
        raise TraceError(at(path, number, f"its time ({', '.join(TIME_FIELDS)}) is {shown(value)}")) from None


def _session(path: Path, number: int, fields: Mapping[str, Any], body: Mapping[str, Any]) -> int | None:
    """Return the id of the line's session; None if it names none. Raises TraceError."""
    for name, value in (
        ("session_id", fields.get("session_id")),
        ("session_id", body.get("session_id")),
        ("user", body.get("user")),
    ):
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise TraceError(at(path, number, f"{name} is {shown(value)}, not a text or a whole number"))
        return session_number(value)
    return None


def _usage(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage that an engine counted, or nothing; a Batch API's result has it in its response's body."""
    places: list[Any] = [fields]
    for name in ("response", "body"):
        places += [place[name] for place in places if isinstance(place.get(name), dict)]
    values = (place.get(name) for place in places for name in ("usage", "meta_info"))
    return next((value for value in values if isinstance(value, dict)), {})


def _output_tokens(
    path: Path, number: int, body: Mapping[str, Any], usage: Mapping[str, Any], prompts: int, options: ReadOptions
) -> int:
    """Return the tokens that are generated for one of a line's prompts: those of all answers to it."""
    if usage.get("completion_tokens") is not None:
        # The sum over all prompts and answers.
        return -(-whole_number(path, number, usage, "completion_tokens", least=0) // prompts)
    answers = 1 if body.get("n") is None else whole_number(path, number, body, "n", least=1)
    params = body.get("sampling_params")
    for place in (body, params if isinstance(params, dict) else {}):
        for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"):
            if place.get(name) is not None:
                options.note("answers without usage are taken to be as long as their max_tokens")
                return answers * whole_number(path, number, place, name, least=0)
    options.note(f"answers of unknown length are taken to have {options.output_tokens} tokens (--output-tokens)")
    return answers * options.output_tokens
