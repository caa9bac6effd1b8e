# SPDX-License-Identifier: Apache-2.0
"""Which paths go on to an engine, all by POST, and how a request there is placed.

Source: vLLM 0.32.0 entrypoints/{openai,anthropic,pooling,speech_to_text}/**/api_router.py."""

from __future__ import annotations

from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    TEXT_PATH,
)

# By the tokens of their prompts, where these are known.
WITH_PROMPT = frozenset({CHAT_PATH, TEXT_PATH, RESPONSES_PATH, EMBEDDINGS_PATH, MESSAGES_PATH})
# These are answered by the engine's HTTP process alone: nothing is computed on the GPU, and no prompt is placed.
WITHOUT_PROMPT = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# By load: each pair of texts is a prompt of its own, which a template of the engine makes, so none of them decides.
PAIRS = frozenset({"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"})

# By load too. Their bodies are forms.
AUDIO = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})

PATHS = WITH_PROMPT | WITHOUT_PROMPT | PAIRS | AUDIO
# A model computes the answer.
INFERENCE_PATHS = WITH_PROMPT | PAIRS | AUDIO
# To send one of these again changes nothing but who computes it. A response may be stored by its engine.
REPEATABLE_PATHS = PATHS - {RESPONSES_PATH}
