# SPDX-License-Identifier: Apache-2.0
"""The paths that are sent on to an engine, and how a request to each of them is placed.

All take POST but those of stored responses, which go to the worker that made the response.

Each path has one entry in PROXIED, which every door of the router reads. Source: vLLM 0.33.0
entrypoints/{openai,anthropic,pooling,speech_to_text,scale_out}/**/api_router.py; SGLang 0.5.23
srt/entrypoints/http_server.py; vLLM-Omni for /v1/audio/speech.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    SGLANG_GENERATE_PATH,
    TEXT_PATH,
)

USAGE_KEY = b'"usage"'


class PlacedBy(Enum):
    """The facts by which a request to a path is placed."""

    # The tokens of its prompt, where they are known, else load.
    TOKENS = "tokens"
    # Load, because the engine makes the prompts by a template of its own, such as one of each pair of texts to score.
    LOAD = "load"
    # Load; the body is a form.
    FORM = "form"
    # Any worker: the engine's HTTP process answers alone, and the GPU computes nothing.
    ANY = "any"


class ProxiedPath(NamedTuple):
    """One path that is sent on to an engine."""

    placed_by: PlacedBy
    # The summary for people.
    summary: str
    # The gen_ai.operation.name of its traces, or None if there is none for it.
    operation: str | None = None
    # The key of the engine's report of usage in its answers.
    usage_key: bytes = USAGE_KEY


BEST = "by the engine that has the least left to compute"
LEAST_LOAD = "by the engine with the least load"
PROXIED = {
    CHAT_PATH: ProxiedPath(PlacedBy.TOKENS, f"A chat, {BEST}", "chat"),
    TEXT_PATH: ProxiedPath(PlacedBy.TOKENS, f"A completion, {BEST}", "text_completion"),
    RESPONSES_PATH: ProxiedPath(PlacedBy.TOKENS, f"A response, {BEST}", "chat"),
    EMBEDDINGS_PATH: ProxiedPath(PlacedBy.TOKENS, "Embeddings, by an engine", "embeddings"),
    MESSAGES_PATH: ProxiedPath(PlacedBy.TOKENS, f"A message of Anthropic's API, {BEST}", "chat"),
    GENERATE_PATH: ProxiedPath(
        PlacedBy.TOKENS, f"An answer in token ids to token ids, where vLLM has it, {BEST}", "text_completion"
    ),
    SGLANG_GENERATE_PATH: ProxiedPath(
        PlacedBy.TOKENS,
        f"An answer to a text or to tokens, where SGLang has it, {BEST}",
        "text_completion",
        b'"meta_info"',
    ),
    f"{MESSAGES_PATH}/count_tokens": ProxiedPath(PlacedBy.ANY, "How many tokens a message has, by an engine"),
    "/v1/audio/transcriptions": ProxiedPath(PlacedBy.FORM, f"The text of a recording, {LEAST_LOAD}"),
    "/v1/audio/translations": ProxiedPath(PlacedBy.FORM, f"The text of a recording in English, {LEAST_LOAD}"),
    "/v1/audio/speech": ProxiedPath(PlacedBy.LOAD, f"A recording of a text, {LEAST_LOAD}"),
    "/pooling": ProxiedPath(PlacedBy.LOAD, f"The output of a pooling model for texts, {LEAST_LOAD}"),
    "/classify": ProxiedPath(PlacedBy.LOAD, f"The classes of texts, {LEAST_LOAD}"),
    "/v1/rerank": ProxiedPath(PlacedBy.LOAD, f"Documents in the order of their relevance, {LEAST_LOAD}"),
    "/v2/rerank": ProxiedPath(PlacedBy.LOAD, "The same, where Cohere's second API has it"),
    "/rerank": ProxiedPath(PlacedBy.LOAD, "The same, where vLLM has it"),
    "/v1/score": ProxiedPath(PlacedBy.LOAD, f"Scores of pairs of texts, {LEAST_LOAD}"),
    "/score": ProxiedPath(PlacedBy.LOAD, "The same, where vLLM has it"),
    "/tokenize": ProxiedPath(PlacedBy.ANY, "The tokens of a text, by an engine"),
    "/detokenize": ProxiedPath(PlacedBy.ANY, "The text of tokens, by an engine"),
}


def _placed_by(placed_by: PlacedBy) -> frozenset[str]:
    return frozenset(path for path, proxied in PROXIED.items() if proxied.placed_by is placed_by)


PATHS = frozenset(PROXIED)
# The paths with a version, such as /v1/rerank. They are known below a prefix too; `/generate` and the like are words that
# may end the path of any program.
VERSIONED_PATHS = frozenset(path for path in PATHS if re.search(r"/v[0-9]+/", path) is not None)
WITH_PROMPT = _placed_by(PlacedBy.TOKENS)
WITHOUT_PROMPT = _placed_by(PlacedBy.ANY)
AUDIO = _placed_by(PlacedBy.FORM)
# Paths whose answer a model computes.
INFERENCE_PATHS = PATHS - WITHOUT_PROMPT
# Sending a request to one of these paths again changes only which engine computes it. A response, in contrast, may be
# stored by its engine.
REPEATABLE_PATHS = PATHS - {RESPONSES_PATH}

# The paths of a stored response, with their methods.
BELOW_RESPONSES = f"{RESPONSES_PATH}/"
STORED_RESPONSE = f"{BELOW_RESPONSES}{{response_id}}"
STORED_PATHS: Mapping[str, tuple[str, ...]] = {
    STORED_RESPONSE: ("GET", "DELETE"),
    f"{STORED_RESPONSE}/cancel": ("POST",),
    f"{STORED_RESPONSE}/input_items": ("GET",),
}


def stored_path(path: str) -> tuple[str, str] | None:
    """Return the path in STORED_PATHS that this path has the form of, and its response's id; None for other paths."""
    if not path.startswith(BELOW_RESPONSES):
        return None
    response_id, slash, below = path.removeprefix(BELOW_RESPONSES).partition("/")
    template = f"{STORED_RESPONSE}{slash}{below}"
    return (template, response_id) if response_id and template in STORED_PATHS else None


def route_of(path: str) -> str:
    """Return the path with a placeholder for the id of a stored response, for metrics and scopes."""
    stored = stored_path(path)
    return path if stored is None else stored[0]
