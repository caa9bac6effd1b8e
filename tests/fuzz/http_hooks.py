# SPDX-License-Identifier: Apache-2.0
"""Hooks that adapt schemathesis to this API (SCHEMATHESIS_HOOKS).

They add MessagePack in both directions, and the rules that the API's schemas cannot express.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import schemathesis

MSGPACK = "application/msgpack"
MODEL = "m"
# Share of bodies that get the model that the replicas serve; otherwise nearly all would be refused as "no such model".
KNOWN_SHARE = 0.7

_rng = random.Random(1)


@schemathesis.serializer(MSGPACK)
def packed(context: Any, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, TypeError):
        # MessagePack has no numbers over 64 bits, no lone surrogates and the like, so other bytes are sent.
        return repr(value).encode("utf-8", "replace")


@schemathesis.deserializer(MSGPACK)
def unpacked(context: Any, response: Any) -> Any:
    return msgspec.msgpack.decode(response.content)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    asks = isinstance(body, dict) and ("token_ids" in body or "block_hashes" in body)
    if asks and isinstance(body.get("model"), str) and _rng.random() < KNOWN_SHARE:
        return {**body, "model": MODEL, "model_name": None, "modelname": None}
    if isinstance(body, dict) and body.keys() & {"endpoint", "url"} and _rng.random() < KNOWN_SHARE:
        # Satisfy the rules that schemas cannot express: a valid address, one of two names, and no contradiction.
        sound = {"url": "http://127.0.0.1:1", "endpoint": None, "replay_endpoint": None, "patch_endpoint": "off"}
        return {
            **body,
            **sound,
            "instance_id": body.get("worker_id"),
            "model": MODEL,
            "model_name": None,
            "modelname": None,
        }
    return body
