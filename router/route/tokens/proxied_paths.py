# SPDX-License-Identifier: Apache-2.0
"""The paths that are sent on to an engine, all by POST, and how a request to each of them is placed.

Source: vLLM 0.32.0 entrypoints/{openai,anthropic,pooling,speech_to_text}/**/api_router.py.
"""

from __future__ import annotations

from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    TEXT_PATH,
)

# Placed by the tokens of their prompts, where these are known.
WITH_PROMPT = frozenset({CHAT_PATH, TEXT_PATH, RESPONSES_PATH, EMBEDDINGS_PATH, MESSAGES_PATH})
# Answered by the engine's HTTP process alone: the GPU computes nothing, and no prompt is placed.
WITHOUT_PROMPT = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# Placed by load: each pair of texts is a prompt of its own, made by a template of the engine, so no single prompt
# decides.
PAIRS = frozenset({"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"})

# Placed by load, too; their bodies are forms.
AUDIO = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})

PATHS = WITH_PROMPT | WITHOUT_PROMPT | PAIRS | AUDIO
# Paths whose answer a model computes.
INFERENCE_PATHS = WITH_PROMPT | PAIRS | AUDIO
# Sending a request to one of these paths again changes only which engine computes it. A response, in contrast, may be
# stored by its engine.
REPEATABLE_PATHS = PATHS - {RESPONSES_PATH}
