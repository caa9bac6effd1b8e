# SPDX-License-Identifier: Apache-2.0
"""The fields of an OpenAI body that the proxy reads, such as the model and the length of the answer.

The bytes are forwarded unchanged, except for the name of a model and the salt of the client's key. Values may be of any
type: the engine reports invalid ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import msgspec

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.route.placement.placement_request import MAX_ANSWERS, MAX_LIMIT_TOKENS
from kvrouter.router.route.tokens.client_body import ClientBody, value_of

# The names of the limit in `sampling_params`, in vLLM and in SGLang.
LIMIT_PARAMS = ("max_tokens", "max_new_tokens")


class OpenAIBody(msgspec.Struct):
    """The fields that the proxy reads; all others are skipped."""

    model: Any = None
    cache_salt: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    # The engines' own paths for token ids have the limit in here.
    sampling_params: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None

    @property
    def limit_tokens(self) -> int | None:
        """The largest number of tokens to generate, or None if the body sets no valid limit."""
        limits = [self.max_completion_tokens, self.max_tokens, self.max_output_tokens]
        if isinstance(self.sampling_params, dict):
            limits += [self.sampling_params.get(name) for name in LIMIT_PARAMS]
        for limit in limits:
            if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
                return min(limit, MAX_LIMIT_TOKENS)
        return None

    @property
    def answers(self) -> int:
        """The number of answers that an engine generates for each prompt; a beam search keeps `n` of them."""
        if self.n is None and self.best_of is None and self.sampling_params is None:
            return 1
        params = self.sampling_params if isinstance(self.sampling_params, dict) else {}
        return max(answers_of(self.n), answers_of(self.best_of), answers_of(params.get("n")))

    @property
    def salt(self) -> str | None:
        """The cache salt, or None if it is absent, empty or not a string."""
        return self.cache_salt if isinstance(self.cache_salt, str) and self.cache_salt else None

    @property
    def has_other_salt(self) -> bool:
        """Whether the cache salt is no text. SGLang takes a list with one for each prompt."""
        return bool(self.cache_salt) and self.salt is None


def answers_of(value: Any) -> int:
    """Return the number of answers that a field such as `n` asks for; 1 if it is no valid number."""
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_ANSWERS
    return value if valid else 1


# New values of a body's fields: a text, or a value in JSON; None removes the field.
Changes: TypeAlias = dict[str, "str | msgspec.Raw | None"]

FIELDS = OpenAIBody.__struct_fields__
# The beginnings of escape sequences for ASCII letters. No encoder writes letters in this way, but a client may.
ESCAPED_LETTERS = (rb"\u004", rb"\u005", rb"\u006", rb"\u007")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def openai_body(body: ClientBody, decode: Callable[[Any], Any] = msgspec.json.decode) -> OpenAIBody:
    """Return the fields of a client's body, each read by `decode`. Raises BadQuestion if they are not JSON."""
    try:
        return OpenAIBody(**{name: value_of(body.fields[name], decode) for name in FIELDS if name in body.fields})
    except RecursionError:
        raise BadQuestion("the body is nested too deeply", code="malformed_body") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise BadQuestion(f"the body is not JSON: {error}", code="malformed_body") from None


class _Name:
    """A name in an object. All names differ, so that a repeated one is not left out."""


def repeated_field(raw: bytes, names: Collection[str]) -> str | None:
    """Return which of these fields a JSON object has more than once, or None. `read_client_body` must accept the object.

    Readers of JSON differ in which of the values they take.
    """
    # In a text or a name, only an escape sequence can hide these bytes; nearly every body has them once at most.
    is_seen_twice = any(raw.count(b'"%b"' % name.encode()) > 1 for name in names)
    if not is_seen_twice and not any(letter in raw for letter in ESCAPED_LETTERS):
        return None
    seen: list[str] = []

    def keep(_: Any, name: str) -> _Name:
        seen.append(name)
        return _Name()

    # Only the names are decoded. Python's reader would make an object of each value, and nothing else would run meanwhile.
    msgspec.json.decode(raw, type=dict[_Name, msgspec.Raw], dec_hook=keep)
    return next((name for name in names if seen.count(name) > 1), None)


def with_fields(raw: bytes, changes: Mapping[str, str | msgspec.Raw | None]) -> bytes:
    """Return the JSON object with these changes; every other value keeps its bytes, unless only Python can read it."""
    try:
        fields = _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        decoded = json.loads(raw)
        for name, value in changes.items():
            decoded[name] = json.loads(bytes(value)) if isinstance(value, msgspec.Raw) else value
        removed = {name for name, value in changes.items() if value is None}
        return json.dumps({name: value for name, value in decoded.items() if name not in removed}).encode()
    for name, value in changes.items():
        if value is None:
            del fields[name]
        else:
            fields[name] = value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def changed_body(body: ClientBody, changes: Changes) -> ClientBody:
    """Return the body with other values of its fields; its `raw` stays the client's."""
    fields = {name: value for name, value in body.fields.items() if name not in changes}
    return msgspec.structs.replace(
        body, fields=fields | {n: v for n, v in changes.items() if isinstance(v, msgspec.Raw)}
    )
