# SPDX-License-Identifier: Apache-2.0
"""Which answers a browser shows to scripts of other origins (the Fetch standard's CORS). Pure.

No answer allows credentials: the key of this API is a header that a script sends itself, never a cookie.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.router.serve.proxy import headers as h

ANY = "*"
# How long a browser may keep the answer to a preflight: no browser's own limit is below.
MAX_AGE_S = 600
METHODS = b"GET, POST, PATCH, DELETE"
# What a script may read besides what every script may (content-type and the like).
EXPOSED = b", ".join(
    (
        h.WORKER,
        h.SELECTION_ID,
        h.PREDICTED_HIT,
        h.PREFILL_WORKER,
        h.RETRIED,
        h.REQUEST_ID,
        b"retry-after",
    )
)
ORIGIN = b"origin"
WANTED_METHOD = b"access-control-request-method"
WANTED_HEADERS = b"access-control-request-headers"


class CorsPolicy:
    """origins: those that are allowed, as browsers write them (`https://app.example`), or ANY. None: nothing is ever
    said."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def answer_headers(self, request: h.Headers) -> h.Headers:
        """What every answer to a request with these headers gets."""
        if not self._origins:
            return h.NOTHING
        found = self._allowed(request)
        if found:
            found.append((b"access-control-expose-headers", EXPOSED))
        return found if self._any else [*found, (b"vary", b"Origin")]

    def allows_preflight(self, method: str, request: h.Headers) -> bool:
        """Whether this is a browser's question before a request of an allowed origin. It has no key: browsers send
        none."""
        return (
            method == "OPTIONS"
            and bool(self._origins)
            and h.header(request, WANTED_METHOD) is not None
            and bool(self._allowed(request))
        )

    def preflight_headers(self, request: h.Headers) -> h.Headers:
        """The answer to that question, besides `answer_headers`."""
        found = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", b"%d" % MAX_AGE_S)]
        wanted = h.header(request, WANTED_HEADERS)
        if wanted:
            # The engine reads headers that are not known here; `*` would leave out Authorization.
            found += [(b"access-control-allow-headers", wanted), (b"vary", b"Access-Control-Request-Headers")]
        return found

    def _allowed(self, request: h.Headers) -> h.Headers:
        origin = h.header(request, ORIGIN)
        if origin is None or not (self._any or origin in self._origins):
            return []
        return [(b"access-control-allow-origin", ANY.encode() if self._any else origin)]
