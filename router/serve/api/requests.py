# SPDX-License-Identifier: Apache-2.0
"""Request bodies as typed structs, and their decoding from JSON or MessagePack.

Unknown fields are ignored. The aliases come from Mooncake's indexer RFC and from Dynamo's services. This module does
not depend on the core.
"""

from __future__ import annotations

from typing import Annotated, Any

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

MAX_NUM_TOKENS = 2**31 - 1

# A field that is absent, or is null in either encoding.
ABSENT = msgspec.Raw(b"null")
NULLS = (b"null", b"\xc0")

# The token_ids or block_hashes of a body: decoded to uint64, or still encoded.
NumberField = NDArray[np.uint64] | msgspec.Raw

NumTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUM_TOKENS, description="length of the whole prompt, in tokens")]
TokenIds = Annotated[list[int], msgspec.Meta(description="token ids of the whole prompt, each 0 to 2147483647")]
BlockHashes = Annotated[
    list[int | str],
    msgspec.Meta(
        description="block hashes from block 0, at the hash block size: u64, i64 or hex (16, 32 or 64 digits)"
    ),
]
# A client's own name for its reservation. It becomes a part of paths.
SelectionId = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=128,
        pattern=r"^[^/?#]+$",
        description="the client's own id; generated if absent",
    ),
]
WorkerIds = Annotated[list[str | int], msgspec.Meta(description="only these workers")]


class _Asked(msgspec.Struct, kw_only=True):
    """The fields of every query: the model under any of its three names, and the inputs of its block hashes."""

    model: str | None = None
    model_name: str | None = None
    modelname: str | None = None
    routing_group: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    workers: WorkerIds | None = None
    explain: bool = False


class _Query(_Asked, kw_only=True):
    """The fields of every query that only reads the index."""

    held: bool = False


class QueryBody(_Query, kw_only=True):
    """The body of `POST /query`."""

    token_ids: TokenIds


class QueryByHashBody(_Query, kw_only=True):
    """The body of `POST /query_by_hash`."""

    block_hashes: BlockHashes
    num_tokens: NumTokens | None = None


class PinnedBody(msgspec.Struct, kw_only=True):
    """The only worker allowed, in the form of Dynamo's clients."""

    worker_id: str | int
    dp_rank: int | None = None


class SessionBody(msgspec.Struct, kw_only=True):
    """The session in the form of Dynamo's clients. Their other fields are ignored."""

    session_id: str


class SelectBody(_Asked, kw_only=True):
    """The body of `POST /select` and `/select_and_reserve`: one of token_ids, block_hashes, prompt and messages.

    prompt and messages are those of OpenAI's completions and chats; the fields beside them (tools,
    chat_template_kwargs, ...) count as they do there. allowed_worker_ids, isl_tokens, expected_output_tokens and
    session_context are Dynamo's names for workers, num_tokens, max_tokens and session_id; pinned_worker is the only
    worker allowed.
    """

    token_ids: TokenIds | None = None
    block_hashes: BlockHashes | None = None
    num_tokens: NumTokens | None = None
    # The default comes from a factory, because a schema cannot show a Raw as a default.
    prompt: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    messages: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    session_id: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    exclude_workers: WorkerIds | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0, description="only this data-parallel rank")] | None = None
    selection_id: SelectionId | None = None
    allowed_worker_ids: WorkerIds | None = None
    isl_tokens: NumTokens | None = None
    expected_output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    session_context: SessionBody | None = None
    pinned_worker: PinnedBody | None = None
    dry_run: bool = False


class ReservationBody(SelectBody, kw_only=True):
    """The body of `POST /reservations`, which counts load at a worker that the client has chosen.

    isl_tokens alone gives a prompt's load; with its tokens or hashes, the worker's hit is subtracted. Without
    worker_id, the body claims the worker that an earlier `/select` chose under this selection_id.
    """

    worker_id: str | int | None = None
    # The tokens to compute, in place of the estimate.
    effective_prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_NUM_TOKENS)] | None = None
    # Whether the tokens to compute count as load; None counts them.
    track_prefill_tokens: bool | None = None


# Fields that `router/base/common/json_arrays.py` decodes.
RAW_FIELDS = frozenset({"token_ids", "block_hashes"})


def _with_raw_arrays(kind: type[Any]) -> type[Any]:
    """Return the same body with its arrays left undecoded; an absent array reads as null."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        if field.name not in RAW_FIELDS:
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = msgspec.field(default_factory=field.default_factory)
            fields.append((field.name, field.type, default))
        elif field.required:
            fields.append((field.name, msgspec.Raw, msgspec.NODEFAULT))
        else:
            fields.append((field.name, msgspec.Raw, ABSENT))
    return msgspec.defstruct(kind.__name__, fields, kw_only=True)


# The key of a request's bounds in the ASGI scope of cold paths.
BOUNDS = "kvrouter.bounds"


def within_bounds(question: Question, bounds: KeyBounds | None) -> Question:
    """Return the question if the request's key may ask it. Raises Forbidden if it may not."""
    if bounds is not None:
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

    def __init__(self, kind: type[Any], *, arrays: bool = True) -> None:
        # With `arrays`, token_ids and block_hashes are decoded too; otherwise, each is a `NumberField`.
        decoded = kind if arrays else _with_raw_arrays(kind)
        self._json = msgspec.json.Decoder(decoded)
        self._msgpack = msgspec.msgpack.Decoder(decoded)
        self._raw_fields = () if arrays else tuple(sorted(RAW_FIELDS.intersection(kind.__struct_fields__)))
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


def worker_ids_of(given: list[str | int] | None) -> frozenset[str] | None:
    """Return worker ids as text, because a plain Dynamo client sends numbers."""
    return None if given is None else frozenset(map(str, given))
