# SPDX-License-Identifier: Apache-2.0
"""The question for the index that a body of OpenAI's API, or of an engine's path for token ids, becomes. Pure.

All fields pass unchanged, since tools, templates and salts are part of the prompt, except those that would steer the
choice.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.route.tokens.client_body import PROMPT_FIELDS, is_given
from kvrouter.router.route.tokens.generate_bodies import check_other_blocks, check_sglang_media
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
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
# Media of /inference/v1/generate, which `/select` does not take.
MEDIA = ("features", "content_parts")
TRUE = msgspec.Raw(b"true")

_fields = msgspec.json.Decoder(Fields)


def fields_of(raw: bytes | msgspec.Raw) -> Fields:
    """Return the fields of a JSON object, undecoded. Raises Unjudged."""
    try:
        return _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unjudged(Skip.BROKEN, str(error)) from None


def has_prompt(body: Fields, *, is_body: bool) -> bool:
    """Return whether the object has messages or a prompt.

    Args:
        body: The fields of the object.
        is_body: Whether the object is a body of a request. A line of a log may have a `text` that is no prompt.
    """
    return is_given(body, "messages") or _prompt_field(body) not in (None, None if is_body else "text")


def question_of(body: Fields, only_model: str | None) -> bytes:
    """Return the body of `/select` for this request. Raises Unjudged.

    `only_model` is the model of a request that names none.
    """
    question = {name: value for name, value in body.items() if name not in STEERING}
    if not is_given(body, "model") and only_model is not None:
        question["model"] = msgspec.Raw(msgspec.json.encode(only_model))
    if not is_given(body, "messages"):
        question.pop("messages", None)
        field = _prompt_field(body)
        if field is None:
            raise Unjudged(Skip.NO_PROMPT)
        _check_blocks(body, field)
        for name in PROMPT_FIELDS:
            question.pop(name, None)
        name, prompt = _prompt(bytes(body[field]))
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


def _prompt_field(body: Fields) -> str | None:
    """Return the name of the field with the prompt, or None. A `text` that is an object, as in the Responses API, is none."""
    fields = (name for name in PROMPT_FIELDS if is_given(body, name))
    return next((name for name in fields if name == "prompt" or bytes(body[name]).startswith((b'"', b"["))), None)


def _check_blocks(body: Fields, field: str) -> None:
    """Raise Unjudged if the prompt's blocks are not those of its tokens."""
    if field == "token_ids" and any(is_given(body, name) for name in MEDIA):
        raise Unjudged(Skip.TOKENS_UNKNOWN, "media among token ids")
    if field in ("input_ids", "text"):
        try:
            check_other_blocks(body)
            check_sglang_media(body)
        except TokensUnknown as unknown:
            raise Unjudged(Skip.TOKENS_UNKNOWN, unknown.problem) from None
