# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as types: each knows its HTTP status and its OpenAI-shaped body.

Messages name the cause and the fix in one line. They reach clients, so they hold no secrets and no tracebacks.
"""

from __future__ import annotations

from typing import ClassVar, TypedDict

# OpenAI's families: the request is at fault, there are too many of them, or the server is.
INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"


class ErrorDetail(TypedDict):
    message: str
    type: str
    code: str


class ErrorBody(TypedDict):
    """`{"error": {"message", "type", "code"}}`, as OpenAI's API has it."""

    error: ErrorDetail


class RouterError(Exception):
    """Base of all errors that a request can be answered with. `code` is for programs, the message for people."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = SERVER_ERROR
    default_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float | None = None) -> None:
        """retry_after_s: when it is worth trying again; the answer then says so in `Retry-After`."""
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.retry_after_s = retry_after_s

    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.type, "code": self.code}}


class BadQuestion(RouterError):
    """400: the body cannot be read as what the endpoint takes."""

    status = 400
    type = INVALID_REQUEST
    default_code = "invalid_body"


class Unauthorized(RouterError):
    """401: no API key, or a wrong one."""

    status = 401
    type = INVALID_REQUEST
    default_code = "invalid_api_key"


class Forbidden(RouterError):
    """403: the API key is known, and not for this."""

    status = 403
    type = INVALID_REQUEST
    default_code = "missing_scope"


class ForeignHost(RouterError):
    """403: the Host header is no name of this router."""

    status = 403
    type = INVALID_REQUEST
    default_code = "foreign_host"


class ForeignOrigin(RouterError):
    """403: a web page of another origin had the request sent."""

    status = 403
    type = INVALID_REQUEST
    default_code = "foreign_origin"


class HostNotAllowed(RouterError):
    """403: the setting allow_hosts does not admit an address of this worker."""

    status = 403
    type = INVALID_REQUEST
    default_code = "host_not_allowed"


class NotFound(RouterError):
    """404: nothing has this address."""

    status = 404
    type = INVALID_REQUEST
    default_code = "not_found"


class UnknownModel(NotFound):
    """404: no worker is registered for this model."""

    default_code = "unknown_model"


class UnknownWorker(NotFound):
    """404: no such worker is registered."""

    default_code = "unknown_worker"


class UnknownSelection(NotFound):
    """404: no such reservation: it was released, has expired, or never was."""

    default_code = "unknown_selection"


class UnknownDecision(NotFound):
    """404: no such decision is kept."""

    default_code = "unknown_decision"


class MethodNotAllowed(RouterError):
    """405: the address exists, the method does not."""

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
    """413: the body is over the limit."""

    status = 413
    type = INVALID_REQUEST
    default_code = "body_too_large"


class WrongMediaType(RouterError):
    """415: the body has a type that web pages may send anywhere, and it is no form."""

    status = 415
    type = INVALID_REQUEST
    default_code = "unsupported_media_type"


class TooSlow(RouterError):
    """408: the request did not come in time."""

    status = 408
    type = INVALID_REQUEST
    default_code = "request_timeout"


class HeadTooLarge(RouterError):
    """431: request line and headers are over the limit."""

    status = 431
    type = INVALID_REQUEST
    default_code = "head_too_large"


class TooManyConnections(RouterError):
    """503: the process has as many connections as it may have."""

    status = 503
    default_code = "too_many_connections"


class NotSupported(RouterError):
    """501: HTTP knows it, and this server does it nowhere."""

    status = 501
    type = INVALID_REQUEST
    default_code = "not_supported"


class WrongVersion(RouterError):
    """505: another version of HTTP."""

    status = 505
    type = INVALID_REQUEST
    default_code = "http_version_not_supported"


class NoWorker(RouterError):
    """503: workers exist, and none can take the request now."""

    status = 503
    default_code = "no_worker"


class Saturated(RouterError):
    """503: every worker that may take the prompt has too much to do already."""

    status = 503
    default_code = "saturated"


class QueueFull(RouterError):
    """429: all are saturated, and as many prompts wait as may."""

    status = 429
    type = RATE_LIMIT
    default_code = "queue_full"


class TooManyRegistrations(RouterError):
    """429: registrations come faster than the router takes them."""

    status = 429
    type = RATE_LIMIT
    default_code = "too_many_registrations"


class WorkerUnreachable(RouterError):
    """502: the engine that was to answer cannot be reached, or broke off before its answer."""

    status = 502
    default_code = "worker_unreachable"


class WorkerSilent(RouterError):
    """504: the engine that was to answer did not, for as long as the router waits."""

    status = 504
    default_code = "worker_timeout"


class StoreDown(RouterError):
    """503: the store does not answer, so nothing can be registered or dropped. Questions are answered from memory."""

    status = 503
    default_code = "store_unavailable"


class SettingError(RouterError):
    """A missing or wrong setting. It ends the start: one line, what is wrong and what to write instead."""

    default_code = "wrong_setting"


class StartError(RouterError):
    """The settings are right and the router still cannot start. One line: the cause and the fix."""

    default_code = "cannot_start"


def internal_error() -> ErrorBody:
    """The body for a bug of ours: it says nothing of the inside, which stands in the log."""
    return RouterError("internal error: this is a bug in the router; its log has the details").body()
