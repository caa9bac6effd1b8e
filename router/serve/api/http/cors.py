# SPDX-License-Identifier: Apache-2.0
"""The answers that a browser shows to scripts of other origins (the Fetch standard's CORS). Pure.

No answer allows credentials: the key of this API is a header that a script sends itself, never a cookie.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.router.serve.proxy import headers as h

ANY = "*"
# How many seconds a browser may keep the answer to a preflight. No browser has a lower limit of its own.
MAX_AGE_S = 600
METHODS = b"GET, POST, PATCH, DELETE"
# The headers that a script may read besides those that every script may (content-type and the like).
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
    """The origins whose scripts may read answers.

    Origins have the form that browsers write (`https://app.example`), or are ANY. Without origins, no answer has CORS
    headers.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def answer_headers(self, request: h.Headers) -> h.Headers:
        """Return the CORS headers of every answer to a request with these headers."""
        if not self._origins:
            return h.NOTHING
        allowed = self._allowed(request)
        if allowed:
            allowed.append((b"access-control-expose-headers", EXPOSED))
        return allowed if self._any else [*allowed, (b"vary", b"Origin")]

    def allows_preflight(self, method: str, request: h.Headers) -> bool:
        """Return whether this is a browser's preflight from an allowed origin.

        It has no key, because browsers send none with a preflight.
        """
        return (
            method == "OPTIONS"
            and bool(self._origins)
            and h.header(request, WANTED_METHOD) is not None
            and bool(self._allowed(request))
        )

    def preflight_headers(self, request: h.Headers) -> h.Headers:
        """Return the headers of the answer to a preflight, besides `answer_headers`."""
        allowed = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", b"%d" % MAX_AGE_S)]
        wanted = h.header(request, WANTED_HEADERS)
        if wanted:
            # The engine reads headers that are not known here, so all are allowed; `*` would leave out Authorization.
            allowed += [(b"access-control-allow-headers", wanted), (b"vary", b"Access-Control-Request-Headers")]
        return allowed

    def _allowed(self, request: h.Headers) -> h.Headers:
        """Return the header that allows the request's origin, or nothing if it is not allowed."""
        origin = h.header(request, ORIGIN)
        if origin is None or not (self._any or origin in self._origins):
            return []
        return [(b"access-control-allow-origin", ANY.encode() if self._any else origin)]
