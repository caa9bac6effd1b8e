# SPDX-License-Identifier: Apache-2.0
"""The errors that a call can raise."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from kvrouter.contract.errors import ErrorReply

# Enough of an answer that is not this API's to recognise its sender.
SHOWN_CHARS = 200


class RouterError(Exception):
    """The base of all errors that a call raises."""

    # Whether the router may have executed the call.
    may_have_acted: bool = True


class RouterUnreachable(RouterError):
    """A failed connection to the router, so nothing was sent."""

    may_have_acted = False


class AnswerLost(RouterError):
    """A connection that broke before the whole answer came."""


class AnswerLate(RouterError):
    """An answer that did not come in time."""


class AnswerUnreadable(RouterError):
    """An answer that is not this API's. Most likely the URL is not a router's."""


class RequestRefused(RouterError):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, sentence: str, retry_after_s: float | None) -> None:
        """Create the error.

        Args:
            status: The HTTP status.
            code: The problem for programs, as docs/reference/http.md lists them; empty if something in front of the
                router answered.
            sentence: The cause and the fix for people.
            retry_after_s: When to try again, if the router says that this is worthwhile, else None.
        """
        super().__init__(f"{sentence} ({status}{' ' if code else ''}{code})")
        self.status = status
        self.code = code
        self.sentence = sentence
        self.retry_after_s = retry_after_s
        # A proxy in front of a router may answer 503 for a connection that broke behind it.
        by_router = bool(code) and status == HTTPStatus.SERVICE_UNAVAILABLE
        self.may_have_acted = status >= HTTPStatus.INTERNAL_SERVER_ERROR and not by_router


class BadRequest(RequestRefused):
    """Status 400 or 413: the request does not fit the endpoint, or is too large."""


class Unauthorized(RequestRefused):
    """Status 401: the API key is missing or wrong."""


class Forbidden(RequestRefused):
    """Status 403: the call is not allowed here, or not with this key."""


class NotFound(RequestRefused):
    """Status 404: the model, worker or reservation does not exist; with the code `not_found`, the path does not."""


class Conflict(RequestRefused):
    """Status 409: the request contradicts what is registered or reserved."""


class TooManyRequests(RequestRefused):
    """Status 429: the client is over a limit of requests."""


class Unavailable(RequestRefused):
    """Status 502, 503 or 504: the request cannot be served now; `code` says why."""


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
    """Return the error for an answer with an error status."""
    try:
        error = msgspec.json.decode(content, type=ErrorReply).error
        code, sentence = error.code, error.message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        code = ""
        sentence = f"no router's error: {content[:SHOWN_CHARS].decode(errors='replace')!r}"
    wait = headers.get("retry-after", "")
    kind = BY_STATUS.get(status, RequestRefused)
    # HTTP also allows dates in this header, which the router does not send.
    return kind(status, code, sentence, float(wait) if wait.isdecimal() else None)
