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

    def __init_subclass__(
        cls, *, status: int | None = None, default_code: str | None = None, type_: str | None = None
    ) -> None:
        """Set what all errors of a class share.

        Args:
            status: The HTTP status; None: that of the base class.
            default_code: The code of an error that is raised without one; None: that of the base class.
            type_: OpenAI's family; None: it follows from the status.
        """
        if default_code is not None:
            cls.default_code = default_code
        if status is not None:
            cls.status = status
            cls.type = type_ or (INVALID_REQUEST if status < 500 else SERVER_ERROR)

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


class BadQuestion(RouterError, status=400, default_code="invalid_body"):
    """400: the body does not decode to the endpoint's request type."""


class CutBody(BadQuestion, default_code="malformed_body"):
    """400: the body ends before its JSON or its content coding does."""


class Unauthorized(RouterError, status=401, default_code="invalid_api_key"):
    """401: no API key, or a wrong one."""


class Forbidden(RouterError, status=403, default_code="missing_scope"):
    """403: the API key is valid but lacks the scope for this request."""


class ForeignHost(RouterError, status=403, default_code="foreign_host"):
    """403: the Host header does not name this router."""


class ForeignOrigin(RouterError, status=403, default_code="foreign_origin"):
    """403: a web page of another origin sent the request."""


class HostNotAllowed(RouterError, status=403, default_code="host_not_allowed"):
    """403: the setting allow_hosts does not admit an address of this worker."""


class NotFound(RouterError, status=404, default_code="not_found"):
    """404: no resource has this address."""


class UnknownModel(NotFound, default_code="unknown_model"):
    """404: no worker is registered for this model."""


class UnknownWorker(NotFound, default_code="unknown_worker"):
    """404: no worker of this name is registered."""


class UnknownHandOver(NotFound, default_code="unknown_hand_over"):
    """404: no engine that answers knows the hand-over."""


class UnknownSelection(NotFound, default_code="unknown_selection"):
    """404: the reservation was released, has expired, or never existed."""


class OwnerGone(NotFound, default_code="response_owner_gone"):
    """404: the worker that made the response no longer has it."""


class UnknownResponse(NotFound, default_code="404"):
    """404: the client has no such response. The body is that of vLLM and SGLang, whose code is the status."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.")

    def body(self) -> ErrorBody:
        """Return the JSON body of the answer."""
        detail = {"message": self.message, "type": self.type, "param": "response_id", "code": self.status}
        return {"error": detail}  # type: ignore[typeddict-item]


class UnknownDecision(NotFound, default_code="unknown_decision"):
    """404: the decision log does not contain this decision."""


class UnknownCode(NotFound, default_code="unknown_code"):
    """404: no kind of finding has this code."""


class MethodNotAllowed(RouterError, status=405, default_code="method_not_allowed"):
    """405: the address exists but does not support the method; `allowed` is the value of the Allow header."""

    def __init__(self, message: str, *, allowed: str = "POST") -> None:
        super().__init__(message)
        self.allowed = allowed


class Conflict(RouterError, status=409, default_code="conflict"):
    """409: the request contradicts the current state."""


class TooLarge(RouterError, status=413, default_code="body_too_large"):
    """413: the body is larger than the limit."""


class WrongMediaType(RouterError, status=415, default_code="unsupported_media_type"):
    """415: the body has a media type that a web page may send to any host, and it is not a form."""


class WrongCoding(RouterError, status=415, default_code="unsupported_content_encoding"):
    """415: the body has a content coding that is not decoded; `accepted` is the value of the Accept-Encoding header."""

    def __init__(self, message: str, *, accepted: str) -> None:
        super().__init__(message)
        self.accepted = accepted


class TooSlow(RouterError, status=408, default_code="request_timeout"):
    """408: the request did not arrive in time."""


class HeadTooLarge(RouterError, status=431, default_code="head_too_large"):
    """431: the request line and headers are larger than the limit."""


class TooManyConnections(RouterError, status=503, default_code="too_many_connections"):
    """503: the process has reached its limit of connections."""


class NotSupported(RouterError, status=501, default_code="not_supported", type_=INVALID_REQUEST):
    """501: HTTP defines the feature, but this server supports it nowhere."""


class WrongVersion(RouterError, status=505, default_code="http_version_not_supported", type_=INVALID_REQUEST):
    """505: the request uses a version of HTTP that the server does not speak."""


class NoWorker(RouterError, status=503, default_code="no_worker"):
    """503: workers exist, but none can take the request now."""


class Saturated(RouterError, status=503, default_code="saturated"):
    """503: every worker that could take the prompt has too much work already."""


class QueueFull(RouterError, status=429, default_code="queue_full", type_=RATE_LIMIT):
    """429: all workers are saturated, and the queue of waiting prompts is full."""


class TooManyRegistrations(RouterError, status=429, default_code="too_many_registrations", type_=RATE_LIMIT):
    """429: registrations arrive faster than the router accepts them."""


class WorkerUnreachable(RouterError, status=502, default_code="worker_unreachable"):
    """502: the engine that should answer cannot be reached, or closed the connection before its answer."""


class WorkerSilent(RouterError, status=504, default_code="worker_timeout"):
    """504: the engine that should answer did not do so within the router's time limit."""


class StoreDown(RouterError, status=503, default_code="store_unavailable"):
    """503: the store does not answer, so no worker can be registered or dropped. Questions are answered from memory."""


class SettingError(RouterError, default_code="wrong_setting"):
    """A missing or wrong setting, which ends the start.

    The message is one line: the cause, and what to write instead.
    """


class StartError(RouterError, default_code="cannot_start"):
    """A start that fails although the settings are right. The message is one line: the cause and the fix."""


def internal_error() -> ErrorBody:
    """Return the body for a bug of the router; it reveals no details, which are in the log."""
    return RouterError("internal error: this is a bug in the router; its log has the details").body()
