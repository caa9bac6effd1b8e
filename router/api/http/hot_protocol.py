# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol, with the hot endpoints and the proxied ones answered in it.

Parsing, keep-alive, pipelining and every other path are uvicorn's, limits are those of `limited_protocol.py`. A hot
request is answered as soon as its body is whole; it skips the task, the events and the two writes that an ASGI
application costs there: a third of the time of a 512-block question. What is sent is what `Outer` would send. A proxied
one (`proxied_cycle.py`) has a task and no more of that. Uses these parts of uvicorn's HttpToolsProtocol: `cycle` (its
`response_complete`, `disconnected`, `message_event`, `run_asgi`), `pipeline`, `flow`, `_start_asgi_task` and
`on_response_complete`; tests/contract/test_api_hot_http.py holds both ways equal."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kvrouter.router.api.http.limited_protocol import HttpLimits, LimitedProtocol
from kvrouter.router.api.http.outer import Answer, Outer, too_large
from kvrouter.router.api.http.proxied_cycle import ProxiedCycle


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


class HotProtocol(LimitedProtocol):
    """Of one connection; `hot_protocol` makes the class for one `Outer`."""

    # The proxied request that was answered last, or is being answered.
    _proxied: ProxiedCycle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        running = self._proxied
        if running is not None and not running.response_complete:
            # uvicorn tells the request that came last; this one is still being answered.
            running.disconnected = True
            running.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._proxied is not None:
            self._proxied.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._proxied is not None:
            self._proxied.resume()

    def on_headers_complete(self) -> None:
        self.check_head()
        outer = self.outer
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        proxied = path in outer.proxied_paths
        hot = proxied or (path in outer.hot_paths and len(path) == len(self.url) and self._is_plain())
        # A client without the key is turned away by the ASGI application, before its body is read.
        if not hot or self.parser.get_method() != b"POST" or not outer.admits(self.headers):
            super().on_headers_complete()
        elif proxied:
            self._begin_proxied(path)
        else:
            self.begin_body()
            keep_alive = self.parser.should_keep_alive() and not self.is_last_message
            self.cycle = HotCycle(path, keep_alive)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if isinstance(cycle, ProxiedCycle):
            self.got_on()
            cycle.take(body)
            return
        if not isinstance(cycle, HotCycle):
            super().on_body(body)
            return
        self.got_on()
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > self.outer.max_body_bytes:
            # The rest of the body is still under way; nobody will read it.
            cycle.keep_alive = False
            self._answer(cycle, self.outer.error_answer(too_large(self.outer.max_body_bytes), cycle.path, ""))

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if isinstance(cycle, ProxiedCycle):
            self.end_message()
            cycle.end_body()
            return
        if not isinstance(cycle, HotCycle):
            super().on_message_complete()
            return
        self.end_message()
        if cycle.response_complete:
            return
        answer = self.outer.hot_answer(cycle.path, "POST", self.headers, bytes(cycle.body))
        if isinstance(answer, tuple):
            self._answer(cycle, answer)
        else:
            # uvicorn keeps the next request waiting until this one is answered, and waits for the task when it stops.
            task = self.loop.create_task(self._answer_later(cycle, answer))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def now_answering(self, cycle: ProxiedCycle) -> None:
        """It is this one's turn."""
        self._proxied = cycle

    def probe_reader(self) -> None:
        running = self._proxied
        if running is not None and not running.response_complete:
            running.probe_reader()

    def _begin_proxied(self, path: str) -> None:
        self.begin_body()
        keep_alive = self._is_http_1_1() and self.parser.should_keep_alive() and not self.is_last_message
        cycle: Any = ProxiedCycle(
            self, path, http_1_1=self._is_http_1_1(), keep_alive=keep_alive, expects=self.expect_100_continue
        )
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            # Runs when what was received is parsed; by then most bodies are whole.
            self._start_asgi_task(cycle, self.app)
        else:
            # As uvicorn does with a request behind another one.
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _is_plain(self) -> bool:
        """Whether it can be answered at once: an answer that finds no room waits as an ASGI application does."""
        free = (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused
        return free and not self.expect_100_continue and not self.parser.should_upgrade() and self._is_http_1_1()

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


def hot_protocol(outer: Outer, limits: HttpLimits | None = None) -> type[HotProtocol]:
    """The protocol class for `uvicorn.Config(http=...)` in front of `outer`."""
    return type("OurProtocol", (HotProtocol,), {"outer": outer, "limits": limits or HttpLimits()})
