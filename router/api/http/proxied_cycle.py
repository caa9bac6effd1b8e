# SPDX-License-Identifier: Apache-2.0
"""A proxied request on uvicorn's connection: the client's side of `router.proxy`.

uvicorn's parser, limits and pipelining stay. What ASGI costs for each piece of a stream (a wake-up, an event) does not
occur: bytes go from the engine's socket to the client's in one callback. It stands in the place of uvicorn's
RequestResponseCycle and has its `disconnected`, `keep_alive`, `message_event`, `more_body`, `response_started`,
`response_complete` and `run_asgi`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, Protocol

from kvrouter.router.api.http.limited_protocol import CONTINUE, STILL_LOOKS
from kvrouter.router.api.http.outer import Answer, Outer, too_large
from kvrouter.router.common.errors import RouterError
from kvrouter.router.proxy.headers import Headers
from kvrouter.router.proxy.upstream.connection import NO_CONTENT, AnswerHead, Connection

LAST_CHUNK = b"0\r\n\r\n"


class ClientConnection(Protocol):
    """What the cycle uses of the protocol that it runs in; what has no type here is uvicorn's."""

    outer: ClassVar[Outer]
    url: bytes
    headers: Headers
    transport: Any
    flow: Any
    loop: asyncio.AbstractEventLoop
    server_state: Any

    def now_answering(self, cycle: ProxiedCycle) -> None: ...

    def write_answer(self, answer: Answer, *, keep_alive: bool) -> None: ...

    def on_response_complete(self) -> None: ...


class ProxiedCycle:
    """One request from its head to the end of its answer; satisfies `router.proxy.downstream.Client`."""

    def __init__(
        self, protocol: ClientConnection, path: str, *, http_1_1: bool, keep_alive: bool, expects: bool
    ) -> None:
        """expects: the client waits for a word before it sends the body."""
        self._protocol = protocol
        self._http_1_1 = http_1_1
        self._expects = expects
        self.path = path
        self.url = protocol.url
        self.headers = protocol.headers
        self._received = bytearray()
        self.body = b""
        # Why it gets no further than its body.
        self._refusal: RouterError | None = None
        self._whole: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._source: Connection | None = None
        # What was not sent yet of the head, which goes with the first bytes of the body.
        self._unsent: list[bytes] = []
        self._chunked = False
        self._probed = False
        # Looks in a row at a client that sends no more in which its answer stood still.
        self._still_looks = 0
        # As uvicorn's protocol knows them.
        self.keep_alive = keep_alive
        self.more_body = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.message_event = self

    # uvicorn's side

    def set(self) -> None:
        """As `message_event`: the connection may be gone."""
        if self.disconnected and self._task is not None:
            self._task.cancel()

    async def run_asgi(self, app: object) -> None:
        """In place of an ASGI application's run: until the answer is out."""
        if self.disconnected:
            return
        protocol, proxy = self._protocol, self._protocol.outer.proxy
        assert proxy is not None
        protocol.now_answering(self)
        self._task = asyncio.current_task()
        try:
            if self.more_body:
                if self._expects:
                    protocol.transport.write(CONTINUE)
                self._whole = protocol.loop.create_future()
                await self._whole
            if self._refusal is None:
                await proxy.forward(self)
            else:
                # The rest of the body is still under way; nobody will read it.
                self.keep_alive = False
                self.refuse(self._refusal, [])
        except asyncio.CancelledError:
            protocol.transport.close()
            if not self.disconnected:
                # Not the client but the server ends it.
                raise
        except Exception:
            answer = protocol.outer.bug_answer(self.path, "")
            if self.response_started:
                protocol.transport.close()
            else:
                protocol.write_answer(answer, keep_alive=False)
        finally:
            self._task = None

    def take(self, body: bytes) -> None:
        """A piece of the body."""
        if not self.more_body:
            return
        self._received += body
        limit = self._protocol.outer.max_body_bytes
        if len(self._received) > limit:
            self.turn_away(too_large(limit))

    def turn_away(self, error: RouterError) -> None:
        """It gets no further than this, whatever else of it comes."""
        self._refusal = error
        self.end_body()

    def end_body(self) -> None:
        if not self.more_body:
            return
        self.more_body = False
        self.body = bytes(self._received)
        self._received.clear()
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def pause(self) -> None:
        """The client does not read."""
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()

    def probe_reader(self) -> None:
        """To a client that sends no more, a word that every one of HTTP/1.1 skips: nobody who hung up takes it. Ends an
        answer that has begun and stands still."""
        if self.response_started:
            self._still_looks += 1
            if self._still_looks > STILL_LOOKS:
                self._protocol.transport.abort()
        elif self._http_1_1 and not self._probed:
            self._probed = True
            self._write([CONTINUE])

    # the proxy's side

    def begin(self, head: AnswerHead, headers: Headers, source: Connection) -> None:
        self._source = source
        self.response_started = True
        self._protocol.outer.count_answer(self.path, head.status)
        reason = head.reason or _phrase(head.status)
        parts = [b"HTTP/1.1 %d " % head.status, reason, b"\r\n"]
        # The engine's own Date, where it has one.
        has_date = any(name == b"date" for name, _ in headers)
        for name, value in headers if has_date else (*headers, *self._protocol.server_state.default_headers):
            parts += (name, b": ", value, b"\r\n")
        if head.status in NO_CONTENT:
            # A length would announce a body.
            pass
        elif head.length is not None:
            parts.append(b"content-length: %d\r\n" % head.length)
        elif self._http_1_1:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self._unsent = parts
        if self._protocol.flow.write_paused:
            source.pause()

    def send(self, parts: list[bytes]) -> None:
        self._still_looks = 0
        out, self._unsent = self._unsent, []
        if self._chunked:
            out += (b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n")
        else:
            out += parts
        self._write(out)

    def finish(self) -> None:
        out, self._unsent = self._unsent, []
        if self._chunked:
            out.append(LAST_CHUNK)
        if out:
            self._write(out)
        self._complete()

    def break_off(self) -> None:
        # Without the last chunk, or with fewer bytes than announced; what was sent before arrives.
        self.keep_alive = False
        self._complete()

    def refuse(self, error: RouterError, headers: Headers) -> None:
        status, own, content = self._protocol.outer.error_answer(error, self.path, "")
        self.response_started = True
        self._protocol.write_answer((status, [*own, *headers], content), keep_alive=self.keep_alive)
        self._complete()

    def _write(self, parts: list[bytes]) -> None:
        if not self._protocol.transport.is_closing():
            self._protocol.transport.write(b"".join(parts))

    def _complete(self) -> None:
        self.response_complete = True
        self._source = None
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
