# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a call, as types."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from kvrouter.client.answers import ErrorReply

# Of what is not this API's, as much as names its sender.
SHOWN_CHARS = 200


class RouterError(Exception):
    """Base of all that a call raises. may_have_acted: whether the router may have done what it was sent."""

    may_have_acted: bool = True


class RouterUnreachable(RouterError):
    """There is no connection to the router, so nothing was sent."""

    may_have_acted = False


class AnswerLost(RouterError):
    """The connection broke before the whole answer came."""


class AnswerLate(RouterError):
    """The answer did not come in time."""


class AnswerUnreadable(RouterError):
    """An answer came that is not this API's: most likely the URL is not a router's."""


class RequestRefused(RouterError):
    """The answer is an error.

    status: of HTTP. code: what went wrong, for programs, as docs/reference/http.md lists them; empty where something in
    front of the router answered. sentence: cause and fix, for people. retry_after_s: when the router says that trying
    again is worth it, else None."""

    def __init__(self, status: int, code: str, sentence: str, retry_after_s: float | None) -> None:
        super().__init__(f"{sentence} ({status}{' ' if code else ''}{code})")
        self.status = status
        self.code = code
        self.sentence = sentence
        self.retry_after_s = retry_after_s
        # Whoever stands in front of a router may say 503 for a connection that broke behind it.
        by_router = bool(code) and status == HTTPStatus.SERVICE_UNAVAILABLE
        self.may_have_acted = status >= HTTPStatus.INTERNAL_SERVER_ERROR and not by_router


class BadRequest(RequestRefused):
    """400, 413: the request does not fit the endpoint, or is too large."""


class Unauthorized(RequestRefused):
    """401: the API key is missing or wrong."""


class Forbidden(RequestRefused):
    """403: this is not allowed here, or not to this key."""


class NotFound(RequestRefused):
    """404: no such model, worker or reservation; with the code `not_found` no such path."""


class Conflict(RequestRefused):
    """409: it contradicts what is registered or reserved."""


class TooManyRequests(RequestRefused):
    """429: over a limit of requests."""


class Unavailable(RequestRefused):
    """502, 503, 504: nobody can take it now; `code` says why."""


BY_STATUS: Mapping[int, type[RequestRefused]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: BadRequest,
    429: TooManyRequests,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> RequestRefused:
    """The error that an answer of this status is."""
    try:
        error = msgspec.json.decode(content, type=ErrorReply).error
        code, sentence = error.code, error.message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        code = ""
        sentence = f"no router's error: {content[:SHOWN_CHARS].decode(errors='replace')!r}"
    wait = headers.get("retry-after", "")
    kind = BY_STATUS.get(status, RequestRefused)
    # HTTP also has dates there, which the router does not send.
    return kind(status, code, sentence, float(wait) if wait.isdecimal() else None)
