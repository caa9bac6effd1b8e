# SPDX-License-Identifier: Apache-2.0
"""From a body of OpenAI's API to the question for the index. Pure.

The fields pass as they are, since tools, templates and salts are part of the prompt; only what would steer the choice
is left out.
"""

from __future__ import annotations

import msgspec

from kvrouter.shadow.observation import Skip, Unjudged

Fields = dict[str, msgspec.Raw]

# Of `/select`, which an engine ignores.
STEERING = frozenset(
    {
        "workers",
        "allowed_worker_ids",
        "exclude_workers",
        "pinned_worker",
        "dp_rank",
        "routing_group",
        "selection_id",
        "session_id",
        "session_context",
        "token_ids",
        "block_hashes",
        "num_tokens",
        "isl_tokens",
        "expected_output_tokens",
        "explain",
        "dry_run",
    }
)
NULL = b"null"
TRUE = msgspec.Raw(b"true")

_fields = msgspec.json.Decoder(Fields)


def fields_of(raw: bytes | msgspec.Raw) -> Fields:
    """The fields of a JSON object, undecoded. Raises Unjudged."""
    try:
        return _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unjudged(Skip.BROKEN, str(error)) from None


def has_prompt(body: Fields) -> bool:
    return _is_given(body, "messages") or _is_given(body, "prompt")


def question_of(body: Fields, only_model: str | None) -> bytes:
    """The body of `/select` for this request. only_model: of requests that name none. Raises Unjudged."""
    asked = {name: value for name, value in body.items() if name not in STEERING}
    if not _is_given(body, "model") and only_model is not None:
        asked["model"] = msgspec.Raw(msgspec.json.encode(only_model))
    if not _is_given(body, "messages"):
        asked.pop("messages", None)
        if not _is_given(body, "prompt"):
            raise Unjudged(Skip.NO_PROMPT)
        name, prompt = _prompt(bytes(asked.pop("prompt")))
        asked[name] = msgspec.Raw(prompt)
    else:
        asked.pop("prompt", None)
    asked["explain"] = asked["dry_run"] = TRUE
    return msgspec.json.encode(asked)


def _prompt(raw: bytes) -> tuple[str, bytes]:
    """The one prompt of a completion, and the field of `/select` for it. Raises Unjudged."""
    if not raw.startswith(b"["):
        return "prompt", raw
    inner = raw[1:].lstrip()
    if not inner.startswith((b"[", b'"')):
        return "token_ids", raw
    prompts = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if len(prompts) != 1:
        raise Unjudged(Skip.SEVERAL_PROMPTS)
    return _prompt(bytes(prompts[0]))


def _is_given(body: Fields, name: str) -> bool:
    value = body.get(name)
    return value is not None and bytes(value) != NULL
