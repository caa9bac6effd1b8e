# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol, with the hot endpoints answered as soon as their body is whole.

Parsing, keep-alive, pipelining and every other path are uvicorn's, limits are those of `http_limits.py`. A hot request skips
the task, the events and the two writes that an ASGI application costs there: a third of the time of a 512-block question.
What is sent is what `Outer` would send. Uses these parts of uvicorn's HttpToolsProtocol: `cycle` (its `response_complete`,
`disconnected`, `message_event`) and `on_response_complete`; tests/contract/test_api_hot_http.py holds both ways equal.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kvrouter.router.api.asgi import Answer, Outer, too_large
from kvrouter.router.api.http_limits import HttpLimits, LimitedProtocol


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


def hot_protocol(outer: Outer, limits: HttpLimits | None = None) -> type[LimitedProtocol]:
    """The protocol class for `uvicorn.Config(http=...)` in front of `outer`."""
    of_outer, of_limits = outer, limits or HttpLimits()

    class HotProtocol(LimitedProtocol):
        outer = of_outer
        limits = of_limits

        def on_headers_complete(self) -> None:
            path = self.url.decode("ascii", "replace")
            # An answer that finds no room waits as an ASGI application does.
            free = (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused
            plain = free and not self.expect_100_continue and not self.parser.should_upgrade()
            hot = plain and path in of_outer.hot_paths and self.parser.get_method() == b"POST" and self._is_http_1_1()
            # A client without the key is turned away by the ASGI application, before its body is read.
            if not hot or not of_outer.admits(self.headers):
                super().on_headers_complete()
                return
            self.begin_body()
            cycle = HotCycle(path, self.parser.should_keep_alive())
            self.cycle = cycle  # type: ignore[assignment]

        def on_body(self, body: bytes) -> None:
            cycle = self.cycle
            if not isinstance(cycle, HotCycle):
                super().on_body(body)
                return
            self.got_on()
            if cycle.response_complete:
                return
            cycle.body += body
            if len(cycle.body) > of_outer.max_body_bytes:
                # The rest of the body is still under way; nobody will read it.
                cycle.keep_alive = False
                self._answer(cycle, of_outer.error_answer(too_large(of_outer.max_body_bytes), cycle.path, ""))

        def on_message_complete(self) -> None:
            cycle = self.cycle
            if not isinstance(cycle, HotCycle):
                super().on_message_complete()
                return
            self.end_message()
            if cycle.response_complete:
                return
            answer = of_outer.hot_answer(cycle.path, "POST", self.headers, bytes(cycle.body))
            if isinstance(answer, tuple):
                self._answer(cycle, answer)
            else:
                # uvicorn keeps the next request waiting until this one is answered, and waits for the task when it stops.
                task = self.loop.create_task(self._answer_later(cycle, answer))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

        def _is_http_1_1(self) -> bool:
            version: str = self.parser.get_http_version()
            return version == "1.1"

        async def _answer_later(self, cycle: HotCycle, answer: Coroutine[Any, Any, Answer]) -> None:
            found = await answer
            if cycle.disconnected or self.transport.is_closing():
                return
            self._answer(cycle, found)

        def _answer(self, cycle: HotCycle, answer: Answer) -> None:
            if (b"connection", b"close") in answer[1]:
                cycle.keep_alive = False
            cycle.response_complete = True
            self.write_answer(answer, keep_alive=cycle.keep_alive)
            self.on_response_complete()

    return HotProtocol
