# SPDX-License-Identifier: Apache-2.0
"""The errors that a request can be answered with. Each type knows its HTTP status and its OpenAI-shaped body.

Messages name the cause and the fix in one line. They reach clients, so they contain no secrets and no tracebacks.
"""

from __future__ import annotations

from typing import ClassVar, TypedDict

# OpenAI's families of errors: the request is at fault, requests come too fast, or the server is at fault.
INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"


class ErrorDetail(TypedDict):
    """The object inside an error body: a message for people, a family, and a code for programs."""

    message: str
    type: str
    code: str


class ErrorBody(TypedDict):
    """The JSON body of an error, in the form of OpenAI's API: `{"error": {"message", "type", "code"}}`."""

    error: ErrorDetail


class RouterError(Exception):
    """Base of all errors that a request can be answered with. Programs read the `code`, people the message."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = SERVER_ERROR
    default_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float | None = None) -> None:
        """Set the message, and optionally a code that replaces the default one.

        Args:
            message: The cause and the fix, in one line.
            code: The code for programs; None for the class's `default_code`.
            retry_after_s: Seconds after which a retry is worthwhile; the answer then has a `Retry-After` header.
        """
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.retry_after_s = retry_after_s

    def body(self) -> ErrorBody:
        """Return the JSON body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code}}


class BadQuestion(RouterError):
    """400: the body does not decode to the endpoint's request type."""

    status = 400
    type = INVALID_REQUEST
    default_code = "invalid_body"


class Unauthorized(RouterError):
    """401: no API key, or a wrong one."""

    status = 401
    type = INVALID_REQUEST
    default_code = "invalid_api_key"


class Forbidden(RouterError):
    """403: the API key is valid but lacks the scope for this request."""

    status = 403
    type = INVALID_REQUEST
    default_code = "missing_scope"


class ForeignHost(RouterError):
    """403: the Host header does not name this router."""

    status = 403
    type = INVALID_REQUEST
    default_code = "foreign_host"


class ForeignOrigin(RouterError):
    """403: a web page of another origin sent the request."""

    status = 403
    type = INVALID_REQUEST
    default_code = "foreign_origin"


class HostNotAllowed(RouterError):
    """403: the setting allow_hosts does not admit an address of this worker."""

    status = 403
    type = INVALID_REQUEST
    default_code = "host_not_allowed"


class NotFound(RouterError):
    """404: no resource has this address."""

    status = 404
    type = INVALID_REQUEST
    default_code = "not_found"


class UnknownModel(NotFound):
    """404: no worker is registered for this model."""

    default_code = "unknown_model"


class UnknownWorker(NotFound):
    """404: no worker of this name is registered."""

    default_code = "unknown_worker"


class UnknownSelection(NotFound):
    """404: the reservation was released, has expired, or never existed."""

    default_code = "unknown_selection"


class UnknownDecision(NotFound):
    """404: the decision log does not contain this decision."""

    default_code = "unknown_decision"


class MethodNotAllowed(RouterError):
    """405: the address exists but does not support the method; `allowed` is the value of the Allow header."""

    status = 405
    type = INVALID_REQUEST
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str = "POST") -> None:
        super().__init__(message)
        self.allowed = allowed


class Conflict(RouterError):
    """409: the request contradicts the current state."""

    status = 409
    type = INVALID_REQUEST
    default_code = "conflict"


class TooLarge(RouterError):
    """413: the body is larger than the limit."""

    status = 413
    type = INVALID_REQUEST
    default_code = "body_too_large"


class WrongMediaType(RouterError):
    """415: the body has a media type that a web page may send to any host, and it is not a form."""

    status = 415
    type = INVALID_REQUEST
    default_code = "unsupported_media_type"


class TooSlow(RouterError):
    """408: the request did not arrive in time."""

    status = 408
    type = INVALID_REQUEST
    default_code = "request_timeout"


class HeadTooLarge(RouterError):
    """431: the request line and headers are larger than the limit."""

    status = 431
    type = INVALID_REQUEST
    default_code = "head_too_large"


class TooManyConnections(RouterError):
    """503: the process has reached its limit of connections."""

    status = 503
    default_code = "too_many_connections"


class NotSupported(RouterError):
    """501: HTTP defines the feature, but this server supports it nowhere."""

    status = 501
    type = INVALID_REQUEST
    default_code = "not_supported"


class WrongVersion(RouterError):
    """505: the request uses a version of HTTP that the server does not speak."""

    status = 505
    type = INVALID_REQUEST
    default_code = "http_version_not_supported"


class NoWorker(RouterError):
    """503: workers exist, but none can take the request now."""

    status = 503
    default_code = "no_worker"


class Saturated(RouterError):
    """503: every worker that could take the prompt has too much work already."""

    status = 503
    default_code = "saturated"


class QueueFull(RouterError):
    """429: all workers are saturated, and the queue of waiting prompts is full."""

    status = 429
    type = RATE_LIMIT
    default_code = "queue_full"


class TooManyRegistrations(RouterError):
    """429: registrations arrive faster than the router accepts them."""

    status = 429
    type = RATE_LIMIT
    default_code = "too_many_registrations"


class WorkerUnreachable(RouterError):
    """502: the engine that should answer cannot be reached, or closed the connection before its answer."""

    status = 502
    default_code = "worker_unreachable"


class WorkerSilent(RouterError):
    """504: the engine that should answer did not do so within the router's time limit."""

    status = 504
    default_code = "worker_timeout"


class StoreDown(RouterError):
    """503: the store does not answer, so no worker can be registered or dropped. Questions are answered from memory."""

    status = 503
    default_code = "store_unavailable"


class SettingError(RouterError):
    """A missing or wrong setting, which ends the start.

    The message is one line: the cause, and what to write instead.
    """

    default_code = "wrong_setting"


class StartError(RouterError):
    """A start that fails although the settings are right. The message is one line: the cause and the fix."""

    default_code = "cannot_start"


def internal_error() -> ErrorBody:
    """Return the body for a bug of the router; it reveals no details, which are in the log."""
    return RouterError("internal error: this is a bug in the router; its log has the details").body()
