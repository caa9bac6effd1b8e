# SPDX-License-Identifier: Apache-2.0
"""The rules for every request whatever its path: key, body limit, counting, and errors.

Hot paths go from the raw body straight to their handlers; all other paths go to the ASGI application of
`fastapi_app.py`. Every answer that is not a success has the shape of `ErrorBody`; no traceback leaves the process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from kvrouter.router.base.common.errors import (
    BadQuestion,
    MethodNotAllowed,
    RouterError,
    TooLarge,
    Unauthorized,
    WrongCoding,
    WrongMediaType,
    internal_error,
)
from kvrouter.router.base.common.shutdown import Shutdown
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS, STORED_PATHS, route_of, stored_path
from kvrouter.router.serve.access.browser_policy import SAFE_METHODS
from kvrouter.router.serve.api.http.cors import CorsPolicy
from kvrouter.router.serve.api.http.guard import Guard
from kvrouter.router.serve.api.http.plain_head import PlainHead
from kvrouter.router.serve.api.http.request import HttpRequest
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.api.requests import BOUNDS, HotRequest
from kvrouter.router.serve.api.reservations import ENDED
from kvrouter.router.serve.api.responses import JSON, encode
from kvrouter.router.serve.api.versioned_paths import VersionedPaths
from kvrouter.router.serve.page.page_files import PAGE, PageFile
from kvrouter.router.serve.proxy import headers as h
from kvrouter.router.serve.proxy.body_decoding import BodyDecoding
from kvrouter.router.serve.proxy.downstream import Client
from kvrouter.router.serve.proxy.proxy import Proxy

if TYPE_CHECKING:
    from kvrouter.router.observe.quality.tracing import RequestTrace, Tracing

log = logging.getLogger(__name__)

HTML = "text/html"
# The types, besides form data, that a page may send to another site without that site's consent (the Fetch standard's
# CORS-safelisted types). curl labels every body as form data by default; no client sends JSON as either of these types.
PAGE_TYPES = frozenset({"text/plain", "multipart/form-data"})
# The number of characters of a path that an error shows.
SHOWN_CHARS = 80

# Each reservation causes two requests below this path. They bypass the application of the cold paths if they need not
# wait.
RESERVATIONS = "/reservations/"
ENDED_JSON = encode(ENDED, "")[0]

# The label of all paths that are not served here, so that a client cannot create series.
OTHER_PATH = "other"

# The hot paths that choose a worker. Queries are not traced, because they change nothing and come by the thousand.
TRACED_PATHS = frozenset({"/select", "/select_and_reserve"})

# Returns the reply, a coroutine that returns it, or its JSON.
HotHandler = Callable[[HotRequest], Any]

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

# Answers a client piece by piece, until the answer is complete.
Forwarder = Callable[[Client], Coroutine[Any, Any, None]]

# Status, headers, content.
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


class HttpApi:
    """The HTTP API behind the connections of `http_connection.py`.

    Only `paths` knows the version in paths: all other arguments have paths without it.
    """

    def __init__(
        self,
        # The handlers of POST paths.
        hot: Mapping[str, HotHandler],
        # The handlers of GET paths whose answers have no end.
        streams: Mapping[str, Forwarder],
        # Ends a reservation by the method and path of a request below RESERVATIONS. Returns the route, or None if the
        # request must take the general path.
        end_here: Callable[[str, str], str | None],
        # The ASGI application of all other paths.
        cold: ASGIApp,
        config: Config,
        metrics: HttpMetrics,
        # Answers the proxied paths; without it, there are none.
        proxy: Proxy | None,
        # None turns traces off.
        tracing: Tracing | None,
        # Returns seconds, for traces.
        clock: Callable[[], float],
        shutdown: Shutdown,
        *,
        # The paths that are also served below a version.
        paths: VersionedPaths,
        # Decides which requests are admitted.
        guard: Guard,
        # The answer to a browser without a key at PAGE.
        login: PageFile | None = None,
    ) -> None:
        self.shutdown = shutdown
        self._guard = guard
        self._login = login
        self.cors = CorsPolicy(config.cors_origins)
        self.paths = paths
        self._hot = hot
        self._streams = streams
        self._end_here = end_here
        self.proxy = proxy
        self._proxied_paths: Collection[str] = frozenset() if proxy is None else PATHS
        self.cold = cold
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self.max_body_bytes = config.max_body_bytes
        self._decoding = BodyDecoding(config.max_body_bytes, metrics.encoded_bodies)
        # The cache of `json_head`.
        self._dated: list[tuple[bytes, bytes]] = []
        self._json_head = b""
        # Targets whose handlers need no headers but those of the body: neither a key, a tenant nor a trace.
        self.plain_paths = {
            spelling.encode(): path
            for path in hot
            for spelling in paths.spellings(path)
            if not guard.reads_heads
            and path not in self._proxied_paths
            and (tracing is None or path not in TRACED_PATHS)
        }
        below = () if guard.reads_heads else paths.spellings(RESERVATIONS)
        self.plain_below = tuple(spelling.encode() for spelling in below)
        self.known_hosts = guard.known_hosts
        # Targets whose headers go on to an engine.
        self.forwarded_paths = {path.encode(): path for path in self._proxied_paths}

    def forwarder(self, request: HttpRequest) -> Forwarder | None:
        """Return the handler that answers the request piece by piece, or None if its answer is whole at once."""
        if self.cors.allows_preflight(request.method, request.headers):
            return None
        if self.proxy is not None and request.path in self._proxied_paths:
            return self.proxy.forward
        if self.proxy is not None and stored_path(request.path) is not None:
            return self.proxy.forward_stored
        return self._streams.get(request.path)

    def refusal(self, request: HttpRequest) -> RouterError | None:
        """Return why a request is refused before its body is read, or None if it is not."""
        if self.cors.allows_preflight(request.method, request.headers):
            return None
        if (refused := self._guard.refusal(request)) is not None:
            return refused
        if request.path in self._streams and request.method != "GET":
            return MethodNotAllowed(f"{request.path} takes GET, not {request.method}", allowed="GET")
        if request.path in self._proxied_paths:
            if request.method != "POST":
                return MethodNotAllowed(f"{request.path} takes POST, not {request.method}")
            if request.url.partition(b"?")[0] != request.path.encode():
                return BadQuestion(f"write the path as {request.path}, without escapes", code="invalid_path")
        elif self.proxy is not None and (stored := stored_path(request.path)) is not None:
            methods = STORED_PATHS[stored[0]]
            if request.method not in methods:
                allowed = ", ".join(methods)
                return MethodNotAllowed(f"{stored[0]} takes {allowed}, not {request.method}", allowed=allowed)
        content_type = request.content_type
        if (
            content_type != JSON
            and is_page_type(content_type)
            and request.method not in SAFE_METHODS
            and request.path not in AUDIO
        ):
            return WrongMediaType(
                f"{request.path[:SHOWN_CHARS]} takes JSON: send the header `Content-Type: application/json`, or none"
            )
        if request.encoding and (undecodable := self._decoding.refusal(request.encoding)) is not None:
            return undecodable
        length = request.content_length
        if length is not None and length.isdigit() and int(length) > self.max_body_bytes:
            return self.too_large()
        return None

    async def decode(self, request: HttpRequest) -> None:
        """Decode the body of a complete request. From then on, it is as if the client had sent it plain.

        Raises RouterError if the body cannot be decoded.
        """
        request.body = await self._decoding.decoded(request.encoding, request.body)
        request.headers, request.encoding = h.decoded(request.headers), b""

    def too_large(self) -> TooLarge:
        """Return the error for a body over the limit."""
        limit = self.max_body_bytes
        return TooLarge(
            f"the body is over the limit of {limit} bytes; send less, or raise max_body_bytes of the router"
        )

    def respond(self, request: HttpRequest) -> Answer | Coroutine[Any, Any, Answer]:
        """Return the answer to a complete request that is neither refused nor proxied, and count it.

        Errors become answers too. The answer is a coroutine if the handler has to wait.
        """
        path = request.path
        if self.cors.allows_preflight(request.method, request.headers):
            self._metrics.requests(OTHER_PATH, 204).inc()
            return 204, self.cors.preflight_headers(request.headers), b""
        handler = self._hot.get(path)
        if handler is None:
            return self._respond_ended(request) if path.startswith(RESERVATIONS) else self._respond_cold(request)
        trace: RequestTrace | None = None
        if self._tracing is not None and path in TRACED_PATHS:
            trace = self._tracing.request(path, list(request.headers), self._clock())
        try:
            if request.method != "POST":
                raise MethodNotAllowed(f"{path} takes POST, not {request.method}")
            hot_request = HotRequest(
                bytes(request.body), 0, request.content_type, "msgpack" not in request.accept, request.bounds
            )
            reply = handler(hot_request)
            if isinstance(reply, CoroutineType):
                return self._respond_later(reply, request, trace)
            return self._reply(reply, request, trace)
        except RouterError as error:
            answer = self.refuse(request, error)
        except Exception:
            answer = self.bug_answer(path, request.accept)
        return self._trace(trace, None, answer)

    def _respond_ended(self, request: HttpRequest) -> Answer | Coroutine[Any, Any, Answer]:
        """Return the answer to a request below RESERVATIONS."""
        try:
            route = self._end_here(request.method, request.path)
        except Exception:
            return self.bug_answer(OTHER_PATH, request.accept)
        if route is None:
            return self._respond_cold(request)
        self._metrics.requests(route, 200).inc()
        content, media_type = encode(ENDED, request.accept)
        return _answer(200, content, media_type)

    def respond_plain(self, head: PlainHead, data: bytes) -> bytes | Answer | Coroutine[Any, Any, Answer] | None:
        """Return the answer to a request that `plain_head` accepted, and count it.

        Bytes are the content of an answer 200 in JSON, which nearly all requests get. None means that nothing has
        changed, and the request must take the general path.
        """
        handler = self._hot.get(head.path)
        if handler is None:
            return self._end_plain(head)
        try:
            reply = handler(
                HotRequest(data, head.body_start, head.content_type, takes_json := "msgpack" not in head.accept)
            )
            if isinstance(reply, CoroutineType):
                return self._respond_later(reply, head, None)
            if takes_json:
                self._metrics.requests(head.path, 200).inc()
                return reply if isinstance(reply, bytes) else encode(reply, "")[0]
            return self._reply(reply, head, None)
        except RouterError as error:
            return self.refuse(head, error)
        except Exception:
            return self.bug_answer(head.path, head.accept)

    def _end_plain(self, head: PlainHead) -> bytes | Answer | None:
        """Return the answer if the request ends a reservation of this process, or None."""
        if "msgpack" in head.accept:
            return None
        try:
            route = self._end_here(head.method, self.paths.unversioned(head.path))
        except Exception:
            return self.bug_answer(OTHER_PATH, head.accept)
        if route is None:
            return None
        self._metrics.requests(route, 200).inc()
        return ENDED_JSON

    def json_head(self, dated: list[tuple[bytes, bytes]]) -> bytes:
        """Return the head of an answer 200 in JSON, up to the value of its length.

        `dated` has the headers of every answer; it is another list whenever they change.
        """
        if dated is not self._dated:
            lines = (b"%b: %b\r\n" % header for header in dated)
            self._json_head = b"".join(
                (STATUS_LINES[200], *lines, b"content-type: ", JSON.encode(), b"\r\ncontent-length: ")
            )
            self._dated = dated
        return self._json_head

    async def _respond_later(
        self, reply: Coroutine[Any, Any, Any], request: HttpRequest | PlainHead, trace: RequestTrace | None
    ) -> Answer:
        """Await the reply, and return its answer. Errors become answers."""
        try:
            return self._reply(await reply, request, trace)
        except RouterError as error:
            answer = self.refuse(request, error)
        except Exception:
            answer = self.bug_answer(request.path, request.accept)
        return self._trace(trace, None, answer)

    def _reply(self, reply: Any, request: HttpRequest | PlainHead, trace: RequestTrace | None) -> Answer:
        """Return the answer 200 with a reply, and count it."""
        content, media_type = (reply, JSON) if isinstance(reply, bytes) else encode(reply, request.accept)
        self._metrics.requests(request.path, 200).inc()
        return self._trace(trace, reply, _answer(200, content, media_type))

    def _trace(self, trace: RequestTrace | None, reply: Any, answer: Answer) -> Answer:
        """End the trace, if there is one, and return the answer."""
        if trace is not None:
            trace.answered(reply, answer[0], self._clock())
        return answer

    async def _respond_cold(self, request: HttpRequest) -> Answer:
        """Return the answer of the ASGI application, and count it."""
        path, _, query = request.url.partition(b"?")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1" if request.speaks_1_1 else "1.0",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": request.headers,
            BOUNDS: request.bounds,
            "server": None,
            "client": None,
        }
        # The application gets the body once. No cold path streams its answer, so none waits for the client's
        # disconnect.
        pending: list[Message] = [{"type": "http.request", "body": bytes(request.body), "more_body": False}]
        status, headers, content = 0, [], bytearray()

        async def receive() -> Message:
            return pending.pop() if pending else {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                content.extend(message.get("body", b""))

        try:
            await self.cold(scope, receive, send)
        except Exception:
            return self.bug_answer(label_of(scope), request.accept)
        self._metrics.requests(label_of(scope), status).inc()
        return status, headers, bytes(content)

    def count_answer(self, path: str, status: int) -> None:
        """Count an answer that was made elsewhere."""
        self._metrics.requests(path, status).inc()

    def count_cut(self, reason: str) -> None:
        """Count a connection that was closed because of the client."""
        self._metrics.connections_cut[reason].inc()

    def refuse(self, request: HttpRequest | PlainHead, error: RouterError) -> Answer:
        """Return the answer with the error of a refused request, and count it."""
        if isinstance(error, Unauthorized) and request.path == PAGE and HTML in request.accept and self._login:
            # A script of the page takes the key, and sends it with its requests to the API.
            self._metrics.requests(PAGE, error.status).inc()
            headers = [(name.encode(), value.encode()) for name, value in self._login.headers.items()]
            length = (b"content-length", b"%d" % len(self._login.content))
            return error.status, [*headers, length, *headers_of(error)], self._login.content
        route = route_of(request.path)
        is_served = (
            route in self._hot or route in self._proxied_paths or route in self._streams or route in STORED_PATHS
        )
        return self.error_answer(error, route if is_served else OTHER_PATH, request.accept)

    def error_answer(self, error: RouterError, label: str = OTHER_PATH, accept: str = "") -> Answer:
        """Return the answer with an error, and count it."""
        content, media_type = encode(error.body(), accept)
        self._metrics.requests(label, error.status).inc()
        return _answer(error.status, content, media_type, headers_of(error))

    def bug_answer(self, label: str, accept: str) -> Answer:
        """Return the answer to a defect of the router, and log and count it. Call it within the except block."""
        log.exception("unhandled error", extra={"path": label})
        self._metrics.internal_errors.labels(label).inc()
        content, media_type = encode(internal_error(), accept)
        self._metrics.requests(label, 500).inc()
        return _answer(500, content, media_type)


def _answer(status: int, content: bytes, media_type: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Answer:
    """Return an answer with its type and length."""
    length = (b"content-length", b"%d" % len(content))
    return status, [(b"content-type", media_type.encode()), length, *headers], content


def is_page_type(content_type: str) -> bool:
    """Return whether the value of a Content-Type is one of PAGE_TYPES."""
    return content_type.partition(";")[0].strip().lower() in PAGE_TYPES


def headers_of(error: RouterError) -> tuple[tuple[bytes, bytes], ...]:
    """Return the additional headers of the answer with this error."""
    if isinstance(error, Unauthorized):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, WrongCoding):
        # RFC 9110, 15.5.16.
        return ((b"accept-encoding", error.accepted.encode()),)
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", error.allowed.encode()),)
    if isinstance(error, TooLarge):
        # The rest of the body is still under way, and will not be read.
        return ((b"connection", b"close"),)
    if error.retry_after_s is not None:
        # HTTP has only whole seconds.
        return ((b"retry-after", b"%d" % math.ceil(error.retry_after_s)),)
    return ()


def label_of(scope: Scope) -> str:
    """Return the label of a cold request for metrics: its route's path template."""
    return getattr(scope.get("route"), "path_format", OTHER_PATH)
