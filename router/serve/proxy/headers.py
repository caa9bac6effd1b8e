# SPDX-License-Identifier: Apache-2.0
"""The rules for the headers that go on to the engine and back to the client. Pure.

Header names are in lower case, as the parser returns them. Headers that belong to one connection (RFC 9110, 7.6.1) stay
on it, in both directions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import lru_cache
from urllib.parse import quote

from kvrouter.router.model.upstream.connection import Headers as Headers
from kvrouter.router.model.upstream.origin import Target

NOTHING: Headers = []

REQUEST_ID = b"x-request-id"
SESSION_ID = b"x-session-id"
PIN = b"x-kvrouter-worker"
DP_RANK = b"x-data-parallel-rank"
CONTENT_TYPE = b"content-type"
CONTENT_ENCODING = b"content-encoding"
CONTENT_LENGTH = b"content-length"
JSON = b"application/json"

# Headers of the answer.
WORKER = b"x-kvrouter-worker"
SELECTION_ID = b"x-kvrouter-selection-id"
PREDICTED_HIT = b"x-kvrouter-predicted-hit"
RETRIED = b"x-kvrouter-retried"
PREFILL_WORKER = b"x-kvrouter-prefill-worker"

# A header of the picker's request: the engine from which the picked one fetches blocks, as host:port.
KV_SOURCE = b"x-kvrouter-kv-source"

# Headers that name the prefill worker to a decode worker's sidecar, as host:port; the second is the sidecar's older
# name for it. Only the router may send them, because a sidecar connects wherever they point. Source:
# llm-d-routing-sidecar internal/proxy/chat_completions.go.
PREFILLER = b"x-prefiller-host-port"
PREFILLER_URL = b"x-prefiller-url"

_OURS = b"x-kvrouter-"
# The router's own setting decides which scripts may read an answer (`router/serve/api/http/cors.py`), whatever the
# engine allows.
_CORS = b"access-control-"

CONNECTION_HEADERS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# These headers are rewritten for the engine; the router has already answered `expect`.
_REQUEST_HEADERS = CONNECTION_HEADERS | {
    b"authorization",
    b"content-length",
    b"expect",
    b"host",
    REQUEST_ID,
    PREFILLER,
    PREFILLER_URL,
}
# The length is sent with the body, if the engine sent one.
_ANSWER_HEADERS = CONNECTION_HEADERS | {b"content-length"}

# A name in a header is ASCII without spaces and without commas, because commas separate the names in RETRIED. The cache
# is large enough for the workers of a large fleet.
MAX_NAMES = 4_096
_SAFE_IN_NAME = "!#$&'*+-.^_`|~/@:()[]{}<>=?;"


@lru_cache(MAX_NAMES)
def named_in_header(worker: str) -> str:
    """Return a worker's route name as a header has it, with unsafe characters percent-encoded."""
    return quote(worker, safe=_SAFE_IN_NAME)


def header(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the first value of a header, or None if it is absent."""
    for name, value in headers:
        if name == wanted:
            return value
    return None


def decoded(headers: Headers) -> Headers:
    """Return the headers of the same request with its body decoded."""
    return [header for header in headers if header[0] not in (CONTENT_ENCODING, CONTENT_LENGTH)]


def as_json(headers: Headers) -> Headers:
    """Return the headers for a body that is JSON.

    Clients leave the content type out or keep a default, as curl does, and an engine refuses any body that is not
    labelled as JSON. Source: vLLM 0.32.0 entrypoints/serve/utils/api_utils.py (validate_json_request); the comparison
    here is the same.
    """
    content_type = header(headers, CONTENT_TYPE)
    if content_type is not None and content_type.lower().partition(b";")[0] == JSON:
        return headers
    return [*((name, value) for name, value in headers if name != CONTENT_TYPE), (CONTENT_TYPE, JSON)]


def request_head(
    target: Target,
    path: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    length: int,
    request_id: bytes,
    authorization: bytes | None,
    rank: int | None,
    added: Headers = NOTHING,
    method: str = "POST",
) -> bytes:
    """Return the head of the request to the engine.

    Args:
        target: The engine's address.
        path: The path with its query, exactly as the client sent it.
        headers: The client's headers.
        length: The length of the body in bytes.
        request_id: The id of the request.
        authorization: The header to send in place of the client's; None sends none.
        rank: The engine's rank that takes the request, in place of the client's header. None keeps the client's header.
        added: The router's own headers.
        method: The method.
    """
    headers = list(headers)
    dropped = _connection_headers(headers, _REQUEST_HEADERS)
    lines = [method.encode(), b" ", target.prefix, path, b" HTTP/1.1\r\nhost: ", target.authority, b"\r\n"]
    for name, value in headers:
        if name in dropped or name.startswith(_OURS):
            continue
        if name == DP_RANK and rank is not None:
            continue
        lines += (name, b": ", value, b"\r\n")
    if authorization is not None:
        lines += (b"authorization: ", authorization, b"\r\n")
    if rank is not None:
        lines += (DP_RANK, b": %d\r\n" % rank)
    for name, value in added:
        lines += (name, b": ", value, b"\r\n")
    lines += (REQUEST_ID, b": ", request_id, b"\r\ncontent-length: %d\r\n\r\n" % length)
    return b"".join(lines)


def answer_headers(given: Headers, added: Headers, request_id: bytes) -> Headers:
    """Return the headers of the answer to the client: the engine's and ours.

    The request's id is added if the engine does not send one.
    """
    dropped = _connection_headers(given, _ANSWER_HEADERS)
    headers = [(name, value) for name, value in given if name not in dropped and not name.startswith((_OURS, _CORS))]
    if header(headers, REQUEST_ID) is None:
        headers.append((REQUEST_ID, request_id))
    return headers + added


def _connection_headers(headers: Headers, always: frozenset[bytes]) -> Container[bytes]:
    """Return `always` and the names that this message's own Connection headers list."""
    if header(headers, b"connection") is None:
        return always
    values = [value for name, value in headers if name == b"connection"]
    return always | {part.strip().lower() for value in values for part in value.split(b",")}
