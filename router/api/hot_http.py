# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol, with the hot endpoints answered as soon as their body is whole.

Parsing, keep-alive, pipelining, limits and every other path are uvicorn's. A hot request skips the task, the events and the
two writes that an ASGI application costs there: a third of the time of a 512-block question. What is sent is what `Outer`
would send. Uses these parts of uvicorn's HttpToolsProtocol: `cycle` (its `response_complete`, `disconnected`,
`message_event`), `on_response_complete` and `server_state.default_headers`; tests/contract/test_api_hot_http.py holds both
ways equal.
"""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvrouter.router.api.asgi import Outer, too_large

STATUS_LINES = {status: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class _NoEvent:
    """Nobody waits for the next message of a hot request."""

    def set(self) -> None:
        pass


class HotCycle:
    """One hot request; the attributes are those that uvicorn's protocol looks at."""

    __slots__ = ("body", "disconnected", "keep_alive", "message_event", "more_body", "path", "response_complete")

    def __init__(self, path: str, keep_alive: bool) -> None:
        self.path = path
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NoEvent()


def hot_protocol(outer: Outer) -> type[HttpToolsProtocol]:
    """The protocol class for `uvicorn.Config(http=...)` in front of `outer`."""

    class HotProtocol(HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            path = self.url.decode("ascii", "replace")
            free = self.cycle is None or self.cycle.response_complete
            plain = free and not self.expect_100_continue and not self.parser.should_upgrade()
            hot = plain and path in outer.hot_paths and self.parser.get_method() == b"POST" and self._is_http_1_1()
            # A client without the key is turned away by the ASGI application, before its body is read.
            if not hot or not outer.admits(self.headers):
                super().on_headers_complete()
                return
            cycle = HotCycle(path, self.parser.should_keep_alive())
            self.cycle = cycle  # type: ignore[assignment]

        def on_body(self, body: bytes) -> None:
            cycle = self.cycle
            if not isinstance(cycle, HotCycle):
                super().on_body(body)
                return
            if cycle.response_complete:
                return
            cycle.body += body
            if len(cycle.body) > outer.max_body_bytes:
                # The rest of the body is still under way; nobody will read it.
                cycle.keep_alive = False
                self._answer(cycle, outer.error_answer(too_large(outer.max_body_bytes), cycle.path, ""))

        def on_message_complete(self) -> None:
            cycle = self.cycle
            if not isinstance(cycle, HotCycle):
                super().on_message_complete()
                return
            if not cycle.response_complete:
                self._answer(cycle, outer.hot_answer(cycle.path, "POST", self.headers, bytes(cycle.body)))

        def _is_http_1_1(self) -> bool:
            version: str = self.parser.get_http_version()
            return version == "1.1"

        def _answer(self, cycle: HotCycle, answer: tuple[int, list[tuple[bytes, bytes]], bytes]) -> None:
            status, headers, content = answer
            parts = [STATUS_LINES[HTTPStatus(status)]]
            for name, value in (*self.server_state.default_headers, *headers):
                parts += (name, b": ", value, b"\r\n")
                if name == b"connection" and value == b"close":
                    cycle.keep_alive = False
            if not cycle.keep_alive and (b"connection", b"close") not in headers:
                parts.append(b"connection: close\r\n")
            parts += (b"\r\n", content)
            cycle.response_complete = True
            if not self.transport.is_closing():
                self.transport.write(b"".join(parts))
                if not cycle.keep_alive:
                    self.transport.close()
            self.on_response_complete()

    return HotProtocol
