# SPDX-License-Identifier: Apache-2.0
"""A line of another router's log: one JSON object. Pure.

A request's body (`messages`, `prompt`, `token_ids` or `input_ids`) stands in the line itself or under `body`,
`request_body` or `request`, as an object or as the text of one; there it may also have its prompt under `text`. The line
may also have the worker, the request's id, a time, and `usage`, or SGLang's `meta_info` (also under `response`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrouter.router.base.common.timestamps import seconds_of, time_in
from kvrouter.router.observe.quality.usage_reader import usage_of
from kvrouter.router.route.tokens.client_body import PROMPT_FIELDS
from kvrouter.shadow.observation import Observation, Outcome, Skip, Unjudged
from kvrouter.shadow.question import Fields, fields_of, has_prompt, question_of

BODY_FIELDS = ("body", "request_body", "request")
WORKER_FIELDS = ("worker", "worker_id", "upstream", "upstream_addr")
USAGES = ("usage", "meta_info")
ID_FIELDS = ("request_id", "x_request_id")
# Large fields that cannot have the worker, the id, the time or the usage: they belong to the prompt or the answer.
LARGE_FIELDS = frozenset({"messages", "tools", "response", *PROMPT_FIELDS, *BODY_FIELDS})


class LogReading(msgspec.Struct, frozen=True):
    """The rules for reading the lines of one log."""

    # Whether the file grows, so that a line without a time is new.
    grows: bool
    # The model of requests that name none.
    only_model: str | None = None


def read_request(line: bytes, reading: LogReading, *, now_s: float, wall_s: float) -> Observation:
    """Return the request in a line. Raises Unjudged.

    Args:
        line: The line.
        reading: How it is read.
        now_s: The time by the clock of the run.
        wall_s: The time in seconds since 1970.
    """
    fields = fields_of(line)
    body = _body(fields)
    about = _decoded(fields)
    inner = about if body is fields else _decoded(body)
    value = time_in(about, inner)
    if value is not None:
        try:
            age_s = max(0.0, wall_s - seconds_of(value))
        except ValueError:
            raise Unjudged(Skip.BROKEN, f"its time is {value!r}") from None
    elif reading.grows:
        age_s = 0.0
    else:
        raise Unjudged(Skip.NO_TIME)
    question = question_of(body, reading.only_model)
    return Observation(question, _outcome(about, _response(fields)), now_s - age_s, _text(about, ID_FIELDS))


def read_outcome(line: bytes) -> tuple[str, Outcome]:
    """Return a request's id and the outcome that a line has for it. Raises Unjudged."""
    fields = fields_of(line)
    about = _decoded(fields)
    request_id = _text(about, ID_FIELDS)
    if request_id is None:
        raise Unjudged(Skip.BROKEN, f"a line has no {' or '.join(ID_FIELDS)}, by which mirrored requests are found")
    return request_id, _outcome(about, _response(fields))


def _body(fields: Fields) -> Fields:
    """Return the fields of the request. Raises Unjudged."""
    if has_prompt(fields, is_body=False):
        return fields
    for name in BODY_FIELDS:
        raw: bytes | msgspec.Raw = fields.get(name, b"")
        if bytes(raw).startswith(b'"'):
            # nginx writes `$request_body` as a string.
            raw = str(msgspec.json.decode(raw)).encode("utf-8", "surrogatepass")
        if bytes(raw).startswith(b"{") and has_prompt(request := fields_of(raw), is_body=True):
            return request
    raise Unjudged(Skip.NO_PROMPT)


def _decoded(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the small fields of an object, decoded. Raises Unjudged."""
    try:
        return {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in LARGE_FIELDS}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unjudged(Skip.BROKEN, str(error)) from None


def _response(fields: Mapping[str, msgspec.Raw]) -> Mapping[str, Any]:
    """Return the engine's answer, as far as the line has it."""
    try:
        response: Any = msgspec.json.decode(fields.get("response", b"null"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    return response if isinstance(response, dict) else {}


def _outcome(about: Mapping[str, Any], response: Mapping[str, Any]) -> Outcome:
    """Return the worker and the token counts of a request from a log line. Raises Unjudged if a count is not valid."""
    usage_fields = next((value for place in (about, response) for name in USAGES if (value := place.get(name))), None)
    usage = usage_of(usage_fields) if isinstance(usage_fields, dict) else None
    cached = about.get("cached_tokens")
    if cached is None and usage is not None:
        cached = usage.cached_tokens
    if cached is not None and (isinstance(cached, bool) or not isinstance(cached, int) or cached < 0):
        raise Unjudged(Skip.BROKEN, f"cached_tokens is {cached!r}")
    return Outcome(_text(about, WORKER_FIELDS), cached, None if usage is None else usage.prompt_tokens)


def _text(about: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the first of these fields that has a value."""
    for name in names:
        value = about.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value not in ("", "-"):
            return value
    return None
