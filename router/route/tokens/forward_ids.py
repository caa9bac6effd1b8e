# SPDX-License-Identifier: Apache-2.0
"""The replacement of a completion's text by its token ids, which saves the engine from tokenizing it again. Pure.

It is done only where the engine's answer stays the same to the last byte; in doubt the client's body is sent unchanged.
A chat is always sent unchanged: the other parts of its answer need the rendered template, and the field that could
carry its ids (`kv_transfer_params.prompt_token_ids`) is meant for the hand-over between prefill and decode. vLLM reads
that field from 0.28 on, and older versions misread it.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.route.tokens.client_body import TEXT_PATH
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.token_request import TRUNCATION

# Below this number of tokens, the engine tokenizes in less time than it takes to read the ids.
MIN_TOKENS = 256

# With these fields the engine needs the text itself: it is returned (echo), is one part of two, or is cut from the
# text. Source: vLLM 0.32.0 entrypoints/openai/completion/{protocol,serving}.py, renderers/online_renderer.py.
NEED_TEXT = ("echo", "suffix", TRUNCATION, "prompt_embeds", "prompt_logprobs")
NOT_GIVEN = (b"null", b"false")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def forwarded_body(path: str, raw: bytes, prompt: Prompt) -> bytes:
    """Return the body to send to the engine: `raw` itself, or the same request with ids; never raises."""
    ids = prompt.token_ids
    if path != TEXT_PATH or not prompt.replaces or ids is None or len(ids) < MIN_TOKENS:
        return raw
    try:
        body = _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return raw
    if not bytes(body.get("prompt", b"")).lstrip().startswith(b'"'):
        return raw
    if any(bytes(body.get(name, b"null")) not in NOT_GIVEN for name in NEED_TEXT):
        return raw
    body["prompt"] = msgspec.Raw(msgspec.json.encode(ids.tolist()))
    return msgspec.json.encode(body)
