# SPDX-License-Identifier: Apache-2.0
"""A completion's text replaced by its token ids, so that the engine need not tokenize it again. Pure.

Only where the engine's answer is the same to the last byte; in doubt the client's body goes on as it came. A chat
always does: its template would have to be rendered for the answer's other parts, and what takes its place
(`kv_transfer_params.prompt_token_ids`) is for the hand-over between prefill and decode, read by vLLM from 0.28 on and
taken for something else before.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.route.tokens.client_body import TEXT_PATH
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.token_request import TRUNCATION

# Below this the engine tokenizes in less time than it takes to read the ids.
MIN_TOKENS = 256

# With these the engine reads the text itself: it is given back (echo), is one part of two, or is cut from the text.
# Source: vLLM 0.32.0 entrypoints/openai/completion/{protocol,serving}.py, renderers/online_renderer.py.
NEED_TEXT = ("echo", "suffix", TRUNCATION, "prompt_embeds", "prompt_logprobs")
NOT_GIVEN = (b"null", b"false")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def forwarded_body(path: str, raw: bytes, prompt: Prompt) -> bytes:
    """What to send to the engine: `raw` itself, or the same request with ids. Never raises."""
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
