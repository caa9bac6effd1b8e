# SPDX-License-Identifier: Apache-2.0
"""The outer ASGI application: key, body limit, hot endpoints, counting, and the last word on errors.

Hot paths go from the raw body straight to `asking`; everything else to FastAPI, which then finds the body already read.
Every answer that is not a success has the shape of `errors.ErrorBody`; no traceback leaves the process.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrouter.router.api.responses import encode
from kvrouter.router.common.errors import (
    BadQuestion,
    MethodNotAllowed,
    RouterError,
    TooLarge,
    Unauthorized,
    internal_error,
)
from kvrouter.router.common.shutdown import Shutdown
from kvrouter.router.config.settings import Config
from kvrouter.router.proxy.proxy import Proxy
from kvrouter.router.proxy.request_reader import PATHS
from kvrouter.router.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from kvrouter.router.quality.tracing import RequestTrace, Tracing

log = logging.getLogger(__name__)

# A load balancer asks these, and has no key.
OPEN_PATHS = frozenset({"/health", "/ready"})

# The label of all paths that we do not serve: a client must not be able to make series.
OTHER_PATH = "other"

# Of the hot paths, those that choose; a question changes nothing and comes by the thousand.
TRACED_PATHS = frozenset({"/select", "/select_and_reserve"})

# Of (raw body, content type): the reply, or a coroutine that returns it.
HotHandler = Callable[[bytes, str], Any]

# Status, headers, content.
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


class ClientGone(Exception):
    """The client hung up before its body was whole; there is nobody to answer."""


class Outer:
    """The ASGI application. `hot` maps POST paths to handlers of (raw body, content type).

    proxy: answers its paths inside the HTTP protocol (`proxied_cycle.py`); here they come only when they are not as
    they should be. tracing: None where no traces are wanted. clock: seconds, for those."""

    def __init__(
        self,
        hot: Mapping[str, HotHandler],
        cold: ASGIApp,
        config: Config,
        metrics: Metrics,
        proxy: Proxy | None,
        tracing: Tracing | None,
        clock: Callable[[], float],
        shutdown: Shutdown,
    ) -> None:
        self.shutdown = shutdown
        self._hot = hot
        self.proxy = proxy
        self.proxied_paths: Container[str] = frozenset() if proxy is None else PATHS
        self._cold = cold
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self.max_body_bytes = config.max_body_bytes
        self._key = None if config.api_key is None else config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._cold(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
            return
        path: str = scope["path"]
        label = path if path in self._hot or path in self.proxied_paths else OTHER_PATH
        sender = _Sender(send)
        headers = _Headers(scope["headers"])
        try:
            if path not in OPEN_PATHS:
                self._check_key(headers.authorization)
            if path in self.proxied_paths:
                raise _not_proxied(path, scope["method"])
            raw = await self._read(receive, headers.length)
            if path in self._hot:
                answer = self.hot_answer(path, scope["method"], scope["headers"], raw)
                await sender.answer(answer if isinstance(answer, tuple) else await answer)
                return
            await self._cold(scope, _already_read(raw, receive), sender.send)
            label = label_of(scope)
        except RouterError as error:
            await sender.answer(self.error_answer(error, label, headers.accept))
            return
        except ClientGone:
            return
        except Exception:
            answer = self.bug_answer(label_of(scope), headers.accept)
            if sender.status is None:
                await sender.answer(answer)
            return
        if sender.status is not None:
            self._metrics.count_request(label, sender.status)

    @property
    def hot_paths(self) -> Container[str]:
        return self._hot

    def hot_answer(
        self, path: str, method: str, given: Iterable[tuple[bytes, bytes]], raw: bytes
    ) -> Answer | Coroutine[Any, Any, Answer]:
        """The answer of a hot path to a whole body of an admitted client, errors included; counted. To be awaited where
        the handler has to wait for something."""
        headers = _Headers(given)
        trace: RequestTrace | None = None
        if self._tracing is not None and path in TRACED_PATHS:
            trace = self._tracing.request(path, list(given), self._clock())
        try:
            if method != "POST":
                raise MethodNotAllowed(f"{path} takes POST, not {method}")
            reply = self._hot[path](raw, headers.content_type)
            if isinstance(reply, CoroutineType):
                return self._awaited(reply, path, headers.accept, trace)
            return self._replied(reply, path, headers.accept, trace)
        except RouterError as error:
            answer = self.error_answer(error, path, headers.accept)
        except Exception:
            answer = self.bug_answer(path, headers.accept)
        return self._traced(trace, None, answer)

    async def _awaited(
        self, reply: Coroutine[Any, Any, Any], path: str, accept: str, trace: RequestTrace | None
    ) -> Answer:
        try:
            return self._replied(await reply, path, accept, trace)
        except RouterError as error:
            answer = self.error_answer(error, path, accept)
        except Exception:
            answer = self.bug_answer(path, accept)
        return self._traced(trace, None, answer)

    def _replied(self, reply: Any, path: str, accept: str, trace: RequestTrace | None) -> Answer:
        content, media_type = encode(reply, accept)
        self._metrics.count_request(path, 200)
        return self._traced(trace, reply, _answered(200, content, media_type))

    def _traced(self, trace: RequestTrace | None, reply: Any, answer: Answer) -> Answer:
        if trace is not None:
            trace.answered(reply, answer[0], self._clock())
        return answer

    def admits(self, given: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether these request headers carry the key, where there is one."""
        try:
            self._check_key(_Headers(given).authorization)
        except Unauthorized:
            return False
        return True

    def count_answer(self, path: str, status: int) -> None:
        """Counts an answer that was not made here."""
        self._metrics.count_request(path, status)

    def count_cut(self, reason: str) -> None:
        """Counts a connection that was closed for the client's fault."""
        self._metrics.connections_cut.labels(reason).inc()

    def error_answer(self, error: RouterError, label: str, accept: str) -> Answer:
        """The answer that tells of `error`; counted."""
        content, media_type = encode(error.body(), accept)
        self._metrics.count_request(label, error.status)
        return _answered(error.status, content, media_type, headers_of(error))

    def bug_answer(self, label: str, accept: str) -> Answer:
        """The answer to a defect of ours, within its except block."""
        log.exception("unhandled error", extra={"path": label})
        self._metrics.internal_errors.labels(label).inc()
        content, media_type = encode(internal_error(), accept)
        self._metrics.count_request(label, 500)
        return _answered(500, content, media_type)

    def _check_key(self, authorization: str) -> None:
        if self._key is None:
            return
        scheme, _, key = authorization.partition(" ")
        # Constant time: how long it takes must not tell how much of the key was right.
        right = hmac.compare_digest(key.strip().encode("utf-8", "surrogatepass"), self._key)
        if scheme.lower() != "bearer" or not right:
            raise Unauthorized("this router wants its API key: send the header `Authorization: Bearer KEY`")

    async def _read(self, receive: Receive, length: str | None) -> bytes:
        limit = self.max_body_bytes
        if length is not None and length.isdigit() and int(length) > limit:
            raise too_large(limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body: bytes = message.get("body", b"")
        if message.get("more_body", False):
            parts = [body]
            size = len(body)
            while message.get("more_body", False) and size <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
            body = b"".join(parts)
        if len(body) > limit:
            raise too_large(limit)
        return body


class _Sender:
    """Remembers the status that was sent, so that no second answer follows the first."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def answer(self, answer: Answer) -> None:
        self.status, headers, content = answer
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})


class _Headers:
    """The request headers that we look at."""

    __slots__ = ("accept", "authorization", "content_type", "length")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.accept = self.authorization = self.content_type = ""
        self.length: str | None = None
        for name, value in headers:
            if name == b"content-type":
                self.content_type = value.decode("latin-1")
            elif name == b"accept":
                self.accept = value.decode("latin-1")
            elif name == b"content-length":
                self.length = value.decode("latin-1")
            elif name == b"authorization":
                self.authorization = value.decode("latin-1")


def _answered(status: int, content: bytes, media_type: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Answer:
    length = (b"content-length", b"%d" % len(content))
    return status, [(b"content-type", media_type.encode()), length, *headers], content


def _not_proxied(path: str, method: str) -> RouterError:
    if method != "POST":
        return MethodNotAllowed(f"{path} takes POST, not {method}")
    return BadQuestion(f"write the path as {path}, without escapes and host", code="invalid_path")


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is over the limit of {limit} bytes; send less, or raise max_body_bytes of the router")


def headers_of(error: RouterError) -> tuple[tuple[bytes, bytes], ...]:
    if isinstance(error, Unauthorized):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", b"POST"),)
    if isinstance(error, TooLarge):
        # The rest of the body is still under way; nobody will read it.
        return ((b"connection", b"close"),)
    if error.retry_after_s is not None:
        # Whole seconds are all that HTTP knows.
        return ((b"retry-after", b"%d" % math.ceil(error.retry_after_s)),)
    return ()


def label_of(scope: Scope) -> str:
    return getattr(scope.get("route"), "path_format", OTHER_PATH)


def _already_read(raw: bytes, receive: Receive) -> Receive:
    """The `receive` of an application that comes after us: the whole body once, then whatever the server says."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again
