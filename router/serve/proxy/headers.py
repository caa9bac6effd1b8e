# SPDX-License-Identifier: Apache-2.0
"""Which headers go on to the engine and back to the client. Pure; names are in lower case, as the parser gives them.

What belongs to one connection (RFC 9110, 7.6.1) stays on it, in both directions.
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
JSON = b"application/json"

# Of the answer.
WORKER = b"x-kvrouter-worker"
SELECTION_ID = b"x-kvrouter-selection-id"
PREDICTED_HIT = b"x-kvrouter-predicted-hit"
RETRIED = b"x-kvrouter-retried"
PREFILL_WORKER = b"x-kvrouter-prefill-worker"

# Names the prefill worker to a decode worker's sidecar, as host:port; the second is the sidecar's older name for it.
# Only the router may send it: a sidecar connects wherever it points.
# Source: llm-d-routing-sidecar internal/proxy/chat_completions.go.
PREFILLER = b"x-prefiller-host-port"
PREFILLER_URL = b"x-prefiller-url"

_OURS = b"x-kvrouter-"
# Which scripts may read an answer of the router is its own setting (`router/serve/api/http/cors.py`), whatever the engine
# allows.
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
# Rewritten for the engine; `expect` was answered here.
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

# A name in a header is ASCII without spaces and without commas, which separate the names in RETRIED. The cache has room
# for the workers of a large fleet.
MAX_NAMES = 4_096
_SAFE_IN_NAME = "!#$&'*+-.^_`|~/@:()[]{}<>=?;"


@lru_cache(MAX_NAMES)
def named_in_header(worker: str) -> str:
    """A worker's route name as a header has it: what cannot stand there is percent-encoded."""
    return quote(worker, safe=_SAFE_IN_NAME)


def header(headers: Headers, wanted: bytes) -> bytes | None:
    """The first value of a header."""
    for name, value in headers:
        if name == wanted:
            return value
    return None


def as_json(headers: Headers) -> Headers:
    """Return the headers for a body that is JSON.

    Clients leave the type out or keep a default, like curl, and an engine refuses any body that is not labelled as
    JSON. Source: vLLM 0.32.0 entrypoints/serve/utils/api_utils.py (validate_json_request); the comparison here is the
    same.
    """
    given = header(headers, CONTENT_TYPE)
    if given is not None and given.lower().partition(b";")[0] == JSON:
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
) -> bytes:
    """The head of the request to the engine.

    path: with its query, as it came. authorization: in place of the client's. rank: which of the engine's ranks takes
    it, in place of what the client says; None: what it says. added: the router's own."""
    headers = list(headers)
    dropped = _connection_headers(headers, _REQUEST_HEADERS)
    lines = [b"POST ", target.prefix, path, b" HTTP/1.1\r\nhost: ", target.authority, b"\r\n"]
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
    """The engine's headers for the client, and ours; the request's id where the engine does not give one."""
    dropped = _connection_headers(given, _ANSWER_HEADERS)
    kept = [(name, value) for name, value in given if name not in dropped and not name.startswith((_OURS, _CORS))]
    if header(kept, REQUEST_ID) is None:
        kept.append((REQUEST_ID, request_id))
    return kept + added


def _connection_headers(headers: Headers, always: frozenset[bytes]) -> Container[bytes]:
    """`always`, and what this message's own Connection headers name."""
    if header(headers, b"connection") is None:
        return always
    named = [value for name, value in headers if name == b"connection"]
    return always | {part.strip().lower() for value in named for part in value.split(b",")}
