# SPDX-License-Identifier: Apache-2.0
"""The question for the index that a body of OpenAI's API becomes. Pure.

All fields pass unchanged, since tools, templates and salts are part of the prompt, except those that would steer the
choice.
"""

from __future__ import annotations

import msgspec

from kvrouter.shadow.observation import Skip, Unjudged

Fields = dict[str, msgspec.Raw]

# Fields of `/select` that an engine ignores.
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
    """Return the fields of a JSON object, undecoded. Raises Unjudged."""
    try:
        return _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unjudged(Skip.BROKEN, str(error)) from None


def has_prompt(body: Fields) -> bool:
    """Return whether the body has messages or a prompt."""
    return _is_given(body, "messages") or _is_given(body, "prompt")


def question_of(body: Fields, only_model: str | None) -> bytes:
    """Return the body of `/select` for this request. Raises Unjudged.

    `only_model` is the model of a request that names none.
    """
    question = {name: value for name, value in body.items() if name not in STEERING}
    if not _is_given(body, "model") and only_model is not None:
        question["model"] = msgspec.Raw(msgspec.json.encode(only_model))
    if not _is_given(body, "messages"):
        question.pop("messages", None)
        if not _is_given(body, "prompt"):
            raise Unjudged(Skip.NO_PROMPT)
        name, prompt = _prompt(bytes(question.pop("prompt")))
        question[name] = msgspec.Raw(prompt)
    else:
        question.pop("prompt", None)
    question["explain"] = question["dry_run"] = TRUE
    return msgspec.json.encode(question)


def _prompt(raw: bytes) -> tuple[str, bytes]:
    """Return the field of `/select` for the one prompt of a completion, and its value. Raises Unjudged."""
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
