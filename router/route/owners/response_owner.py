# SPDX-License-Identifier: Apache-2.0
"""The owner of a stored response: the worker that made it and the client that it was made for. Pure."""

from __future__ import annotations

import re

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys

# The ids that are remembered. Engines make `resp_` and 32 hex digits; a client of vLLM may choose another with
# `request_id`. An id becomes a part of a path and of a key, so it has no separator of either and a bounded length.
USABLE_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}")


class ResponseOwner(msgspec.Struct, frozen=True, gc=False):
    """The owner of one response."""

    worker: WorkerKey
    # The name of the API key that the response was made with; "" if the router wanted none.
    caller: str
    # When the engine's process started, in seconds since 1970; None if it was not known.
    engine_start_s: float | None = None
    # The tokens of the conversation up to the response's end; 0 if they are not known.
    conversation_tokens: int = 0


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """The form in Redis: the parts of the worker's key are quoted there, because they may be no valid Unicode."""

    model: str
    worker: str
    caller: str
    engine_start_s: float | None
    conversation_tokens: int


_decode = msgspec.json.Decoder(_Stored).decode


def packed(owner: ResponseOwner) -> bytes:
    """Return the owner as the value of its key in Redis."""
    worker = owner.worker
    return msgspec.json.encode(
        _Stored(
            keys.model_member(worker.model),
            keys.registry_field(worker),
            owner.caller,
            owner.engine_start_s,
            owner.conversation_tokens,
        )
    )


def unpacked(value: bytes) -> ResponseOwner:
    """Return the owner that `packed` wrote. Raises ValueError for other values."""
    stored = _decode(value)
    model = keys.parse_model_member(stored.model.encode("ascii"))
    worker = keys.parse_registry_field(model, stored.worker.encode("ascii"))
    return ResponseOwner(worker, stored.caller, stored.engine_start_s, stored.conversation_tokens)
