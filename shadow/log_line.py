# SPDX-License-Identifier: Apache-2.0
"""A line of another router's log: one JSON object. Pure.

A request has its body (`messages` or `prompt`) in the line itself or under `body`, `request_body` or `request`, as an
object or as the text of one. Beside it may stand the worker, the request's id, a time, and `usage` (also under
`response`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrouter.router.base.common.timestamps import seconds_of, time_in
from kvrouter.router.observe.quality.usage_reader import usage_of
from kvrouter.shadow.observation import Observation, Outcome, Skip, Unjudged
from kvrouter.shadow.question import Fields, fields_of, has_prompt, question_of

BODY_FIELDS = ("body", "request_body", "request")
WORKER_FIELDS = ("worker", "worker_id", "upstream", "upstream_addr")
ID_FIELDS = ("request_id", "x_request_id")
# Where nothing of what a line says about its request can be: the prompt.
LARGE_FIELDS = frozenset({"messages", "prompt", "tools", "response", *BODY_FIELDS})


class LogReading(msgspec.Struct, frozen=True):
    """grows: the file does, so a line without a time is new. only_model: of requests that name none."""

    grows: bool
    only_model: str | None = None


def read_request(line: bytes, reading: LogReading, *, now_s: float, wall_s: float) -> Observation:
    """The request in a line. now_s: by the clock of the run; wall_s: seconds since 1970. Raises Unjudged."""
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
    """What a line says of a request that is known by its id, and the id. Raises Unjudged."""
    fields = fields_of(line)
    about = _decoded(fields)
    request_id = _text(about, ID_FIELDS)
    if request_id is None:
        raise Unjudged(Skip.BROKEN, f"a line has no {' or '.join(ID_FIELDS)}, by which mirrored requests are found")
    return request_id, _outcome(about, _response(fields))


def _body(fields: Fields) -> Fields:
    """The fields of the request. Raises Unjudged."""
    if has_prompt(fields):
        return fields
    for name in BODY_FIELDS:
        raw: bytes | msgspec.Raw = fields.get(name, b"")
        if bytes(raw).startswith(b'"'):
            # As nginx writes `$request_body`.
            raw = str(msgspec.json.decode(raw)).encode("utf-8", "surrogatepass")
        if bytes(raw).startswith(b"{") and has_prompt(found := fields_of(raw)):
            return found
    raise Unjudged(Skip.NO_PROMPT)


def _decoded(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The small fields of an object, decoded."""
    try:
        return {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in LARGE_FIELDS}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unjudged(Skip.BROKEN, str(error)) from None


def _response(fields: Mapping[str, msgspec.Raw]) -> Mapping[str, Any]:
    """What the engine answered, as far as the line has it."""
    try:
        found: Any = msgspec.json.decode(fields.get("response", b"null"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict) and isinstance(found.get("body"), dict):
        found = found["body"]
    return found if isinstance(found, dict) else {}


def _outcome(about: Mapping[str, Any], response: Mapping[str, Any]) -> Outcome:
    """Raises Unjudged."""
    told = about.get("usage") or response.get("usage")
    usage = usage_of(told) if isinstance(told, dict) else None
    cached = about.get("cached_tokens")
    if cached is None and usage is not None:
        cached = usage.cached_tokens
    if cached is not None and (isinstance(cached, bool) or not isinstance(cached, int) or cached < 0):
        raise Unjudged(Skip.BROKEN, f"cached_tokens is {cached!r}")
    return Outcome(_text(about, WORKER_FIELDS), cached, None if usage is None else usage.prompt_tokens)


def _text(about: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these fields with a value."""
    for name in names:
        value = about.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value not in ("", "-"):
            return value
    return None
