# SPDX-License-Identifier: Apache-2.0
"""What schemathesis must know of this API (SCHEMATHESIS_HOOKS): MessagePack in both directions, and what its schemas
cannot say."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import schemathesis

MSGPACK = "application/msgpack"
MODEL = "m"
# Else nearly every question would end at "no such model".
KNOWN_SHARE = 0.7

_rng = random.Random(1)


@schemathesis.serializer(MSGPACK)
def packed(context: Any, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, TypeError):
        # Numbers over 64 bits, lone surrogates and the like: not MessagePack, so it goes as bytes that are none.
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
        # What schemas cannot say: an address, one name of two, and no contradiction.
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
