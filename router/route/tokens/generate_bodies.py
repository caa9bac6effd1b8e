# SPDX-License-Identifier: Apache-2.0
"""The prompts of the engines' own paths for token ids: vLLM's /inference/v1/generate and SGLang's /generate. Pure.

Source: vLLM 0.33.0 entrypoints/scale_out/token_in_token_out/{protocol,serving}.py; SGLang 0.5.23
srt/managers/io_struct.py, srt/managers/schedule_batch.py (_compute_max_prefix_len).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.kvcache.multimodal import MAX_ITEMS
from kvrouter.router.route.tokens.client_body import TOO_LONG, check_elements, is_given, value_of
from kvrouter.router.route.tokens.media_features import MediaFeatures, items_of
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown

Fields = dict[str, msgspec.Raw]

# Fields of SGLang's /generate with media.
MEDIA = ("image_data", "video_data", "audio_data")
# Fields of SGLang, at each of its paths, with which the blocks are not those of the tokens: a name that is hashed before
# them, an adapter, a session whose earlier turns come before the prompt, and embeddings in place of tokens.
OTHER_BLOCKS = ("extra_key", "lora_path", "session_params", "input_embeds", "positional_embed_overrides")

_features = msgspec.json.Decoder(MediaFeatures | None)


def vllm_prompt(fields: Fields, ids: NDArray[np.int64]) -> Prompt:
    """Return the prompt of a request to vLLM's /inference/v1/generate with these ids.

    Raises:
        BadQuestion: The places of its media cannot be read.
        TokensUnknown: The engine itself inserts its media.
    """
    if is_given(fields, "content_parts"):
        raise TokensUnknown("media", "content_parts: only the engine knows the tokens of the media that it fetches")
    raw = fields.get("features")
    if raw is None:
        return Prompt(len(ids), ids, "given")
    check_elements(raw, "features")
    try:
        items = items_of(_features.decode(raw), len(ids))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadQuestion(f"features cannot be read: {error}; at most {MAX_ITEMS} items are read") from None
    return Prompt(len(ids), ids, "given", items=items)


def check_other_blocks(fields: Fields) -> None:
    """Raise TokensUnknown if a request has a field with which its blocks are not those of its tokens."""
    if fields.keys().isdisjoint(OTHER_BLOCKS):
        return
    for name in OTHER_BLOCKS:
        if is_given(fields, name):
            raise TokensUnknown("not_looked_up", f"{name}: only the engine knows which of its blocks the prompt reuses")


def check_sglang_media(fields: Fields) -> None:
    """Raise TokensUnknown if a request to SGLang's /generate has media."""
    for name in MEDIA:
        if is_given(fields, name):
            raise TokensUnknown("media", f"{name}: only the engine knows the tokens of media")


def sglang_prompt(fields: Fields, ids: NDArray[np.int64]) -> Prompt:
    """Return the prompt of a request to SGLang's /generate with these ids.

    If it wants the log-probabilities of the prompt from some token on, the engine reuses nothing from there on.
    """
    known_tokens = _first_logprob(fields)
    if known_tokens is None or known_tokens >= len(ids):
        return Prompt(len(ids), ids, "given")
    problem = (
        f"log-probabilities of the prompt are wanted from token {known_tokens} on, so the engine computes it from there"
    )
    return Prompt(len(ids), ids[:known_tokens], "given", problem, known_tokens=known_tokens)


def _first_logprob(fields: Fields) -> int | None:
    """Return the index of the first token of the prompt whose log-probability is wanted, or None if none is."""
    if not (is_given(fields, "return_logprob") and is_given(fields, "logprob_start_len")):
        return None
    wanted, start = (_first(fields, name) for name in ("return_logprob", "logprob_start_len"))
    if TOO_LONG in (wanted, start):
        # Nothing is known to be reused, because these values are not read.
        return 0
    is_index = isinstance(start, int) and not isinstance(start, bool) and start >= 0
    return start if wanted is True and is_index else None


def _first(fields: Fields, name: str) -> Any:
    """Return the value of a field, or its first one if it has one for each prompt; the engine reports invalid ones."""
    try:
        value = value_of(fields[name])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return value[0] if isinstance(value, list) and value else value
