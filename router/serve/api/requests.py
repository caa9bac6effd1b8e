# SPDX-License-Identifier: Apache-2.0
"""The decoding of request bodies from JSON or MessagePack. It does not depend on the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.json_arrays import LONG_BODY_BYTES
from kvrouter.router.base.common.json_numbers import split_integers
from kvrouter.router.index.matching.question import Question
from kvrouter.router.serve.access.key_bounds import KeyBounds

MSGPACK = "application/msgpack"
MSGPACK_TYPES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})


# A field that is absent, or is null in either encoding.
ABSENT = msgspec.Raw(b"null")
NULLS = (b"null", b"\xc0")

# The token_ids or block_hashes of a body: decoded to uint64, or still encoded.
NumberField = NDArray[np.uint64] | msgspec.Raw


# Fields that `router/base/common/json_arrays.py` decodes.
NUMBER_FIELDS = frozenset({"token_ids", "block_hashes"})
# Fields of a body that its reader leaves encoded. A text is decoded where it is tokenized.
RAW_FIELDS = NUMBER_FIELDS | {"prompt", "messages"}


def _with_raw_fields(kind: type[Any]) -> type[Any]:
    """Return the same body with its prompt left undecoded; an absent field reads as null."""
    fields = msgspec.structs.fields(kind)
    if not any(field.name in RAW_FIELDS for field in fields):
        return kind
    raw = [
        (field.name, msgspec.Raw, msgspec.NODEFAULT if field.required else ABSENT)
        if field.name in RAW_FIELDS
        else (field.name, field.type, field.default)
        for field in fields
    ]
    return msgspec.defstruct(kind.__name__, raw, kw_only=True)


# The key of a request's bounds in the ASGI scope of cold paths.
BOUNDS = "kvrouter.bounds"


def within_bounds(question: Question, bounds: KeyBounds | None) -> Question:
    """Return the question with the salt that the request's key gives it, if it gives any.

    Raises Forbidden if the key may not ask the question, and BadQuestion if the request must name its tenant.
    """
    if bounds is not None:
        cache_salt = bounds.asked_salt(question.cache_salt)
        if cache_salt != question.cache_salt:
            question = msgspec.structs.replace(question, cache_salt=cache_salt)
        bounds.check_model(question.model, question.lora_name)
        hashed = question.block_hashes is not None and len(question.block_hashes) > 0
        bounds.check_salt(question.cache_salt, hashed=hashed)
    return question


class HotRequest(msgspec.Struct, frozen=True):
    """The parts of a request that a handler of a hot path needs."""

    data: bytes
    # The index in `data` at which the body begins.
    start: int
    content_type: str
    # Whether the reply may be encoded JSON.
    takes_json: bool
    # The models and salts that the request's key may name; None means any.
    bounds: KeyBounds | None = None

    @property
    def is_long(self) -> bool:
        """Whether a thread should read the body, so that other requests are answered in the meantime."""
        return len(self.data) - self.start >= LONG_BODY_BYTES


def is_msgpack(content_type: str) -> bool:
    """Return whether a body is MessagePack. All other bodies are read as JSON, because `curl -d` sends form data."""
    return "msgpack" in content_type and content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES


class BodyReader:
    """A decoder of one kind of body from both encodings. It is built once, because decoders are expensive to build."""

    def __init__(self, kind: type[Any]) -> None:
        # The prompt of a body stays encoded: token_ids and block_hashes are each a `NumberField`.
        decoded = _with_raw_fields(kind)
        self._json = msgspec.json.Decoder(decoded)
        self._msgpack = msgspec.msgpack.Decoder(decoded)
        self._raw_fields = tuple(sorted(NUMBER_FIELDS.intersection(kind.__struct_fields__)))
        self._raw_names = tuple(name.encode() for name in self._raw_fields)

    def read(self, raw: bytes, content_type: str, start: int = 0) -> Any:
        """Return the struct of the body that begins at `start`. Raises BadQuestion if it cannot be decoded."""
        packed = is_msgpack(content_type)
        if self._raw_names and not packed:
            body = self._read_split(raw, start)
            if body is not None:
                return body
        if start:
            raw = raw[start:]
        try:
            return (self._msgpack if packed else self._json).decode(raw)
        except msgspec.ValidationError as error:
            raise BadQuestion(f"the body does not fit: {error}") from None
        except RecursionError:
            raise BadQuestion("the body is nested too deeply", code="malformed_body") from None
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            encoding = "MessagePack" if packed else "JSON"
            raise BadQuestion(f"the body is not {encoding}: {error}", code="malformed_body") from None

    def _read_split(self, raw: bytes, start: int) -> Any:
        """Return the struct of a JSON body with one array of plain integers, read in one pass, or None for others."""
        split = split_integers(raw, start, self._raw_names)
        if split is None:
            return None
        rest, index, integers = split
        try:
            body = self._json.decode(rest)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            # The error must name a position in the whole body, so the ordinary decoder reports it.
            return None
        setattr(body, self._raw_fields[index], integers)
        return body


def is_given(field: NumberField) -> bool:
    """Return whether the field is present and not null."""
    # The length is checked first, because a long text need not be copied.
    return not isinstance(field, msgspec.Raw) or memoryview(field).nbytes > 4 or bytes(field) not in NULLS


def worker_ids_of(given: Sequence[str | int] | None) -> frozenset[str] | None:
    """Return worker ids as text, because a plain Dynamo client sends numbers."""
    return None if given is None else frozenset(map(str, given))
