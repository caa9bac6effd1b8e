# SPDX-License-Identifier: Apache-2.0
"""One kept HTTP/1.1 connection to an engine, with one exchange at a time, on the parser that uvicorn uses
(docs/adr/0013); an answer that leaves nothing to judge is read without it (`plain_answer.py`).

The body of an answer is handed on as it comes, without a task in between; whoever takes it says when it has enough for
now, and then the socket is left unread. Nothing here retries, follows a redirect or decodes content.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import Callable
from typing import cast

import httptools
import msgspec

from kvrouter.router.base.common.direct_task import Signal
from kvrouter.router.base.common.sockets import poller, untaken_bytes
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.plain_answer import plain_answer, whole_chunks

# Of the head of an answer with the interim ones before it, of a chunk's extensions or of trailers: engines send some
# hundred bytes.
MAX_HEAD_BYTES = 64 * 1024
# Interim answers (1xx) before one answer: there is no use for more than one of each kind.
MAX_INTERIM_ANSWERS = 8
# Read ahead of whoever takes the body, before it does: one read of the loop is as much.
MAX_WAITING_BYTES = 256 * 1024

NO_CONTENT = frozenset({204, 304})
FIRST_FINAL_STATUS = 200
VERSIONS = frozenset({"1.0", "1.1"})
# What the general parser has to know of an answer whose first chunks were read without it.
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

# Control characters, which no reason phrase may contain (RFC 9112, 4): a terminal would act on them.
UNPRINTABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

Headers = list[tuple[bytes, bytes]]
Take = Callable[[list[bytes]], None]


class AnswerHead(msgspec.Struct, gc=False):
    """length: of the body, None where the engine does not say."""

    status: int
    reason: bytes
    headers: Headers
    length: int | None


class Connection(asyncio.Protocol):
    """The engine's side of an exchange: `ask`, then `relay` until the answer is whole."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._readable: select.poll | None = None
        # Set once for many exchanges: it looks how long ago something was heard.
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s = 0.0
        self.used = False
        # When it became idle, on the loop's clock.
        self.idle_s = 0.0
        self._clear()

    def _clear(self) -> None:
        # From where an answer is not plain.
        self._parser: httptools.HttpResponseParser | None = None
        self._head: Signal[AnswerHead] | None = None
        self._end: Signal[None] | None = None
        self._status = 0
        self._reason = b""
        self._headers: Headers = []
        self._length: int | None = None
        self._head_whole = self._whole = self._until_close = self._stays_open = False
        self._fruitless_bytes = self._interim_answers = 0
        self._parts: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._failure: Failure | None = None
        self._take: Take | None = None
        self._heard_s = 0.0
        # Of the request; and of these, what the engine's side had not taken when it closed the connection.
        self._sent_bytes = 0
        self._untaken_bytes = 0

    def ask(self, head: bytes, body: bytes, silence_s: float) -> Signal[AnswerHead]:
        """Sends a request; to be awaited for the first byte of the answer's body, or its end. Raises Failure, and so
        may what is awaited.

        The head alone is no answer yet: vLLM sends that of a stream before it computes anything."""
        assert self._transport is not None and self._head is None
        if self._transport.is_closing():
            raise self._closed()
        self._sent_bytes = len(head) + len(body)
        answered = self._head = Signal()
        self._silence_s = silence_s
        self._heard_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(silence_s, self._on_silence)
        if len(body) < MAX_WAITING_BYTES:
            # One segment, and one wake-up of the engine, for nearly every request.
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return answered

    def relay(self, take: Take) -> Signal[None]:
        """Hands the body on; to be awaited until its end. Raises Failure, after what came before it was handed on, and
        so may what is awaited."""
        self._take = take
        parts, self._parts = self._parts, []
        if parts:
            take(parts)
        if self._paused:
            self._unpause()
        if self._failure is not None:
            raise self._failure
        ended: Signal[None] = Signal()
        if self._whole:
            ended.set(None)
        else:
            self._end = ended
        return ended

    def pause(self) -> None:
        """Whoever takes the body has enough for now."""
        if not self._paused and not self._whole and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """It has room again."""
        self._heard_s = self._loop.time()
        self._unpause()

    def _unpause(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def give_up(self, failure: Failure) -> None:
        """Ends an exchange that waits for its first byte; a later one is left alone."""
        if self._head is not None and not self._head.is_set:
            self._fail(failure)

    def close(self) -> None:
        """At once: an engine that computes for nobody notices by it."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def reusable(self) -> bool:
        """After an exchange: whether another one may follow. Makes the connection ready for it."""
        transport = self._transport
        if transport is None or not self._whole or self._until_close or self._failure is not None:
            return False
        # What is unsent of a request that was answered early would be taken for the next one.
        unsent = transport.is_closing() or transport.get_write_buffer_size() > 0
        if unsent or not self._stays_open:
            return False
        if self._paused:
            self._unpause()
        self._clear()
        self.used = True
        return True

    @property
    def is_open(self) -> bool:
        """Of an idle one: whether the next request may go over it. The kernel may know of its end before the loop
        does."""
        transport, readable = self._transport, self._readable
        return transport is not None and readable is not None and not transport.is_closing() and not readable.poll(0)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio's and not their class.
        self._transport = cast(asyncio.Transport, transport)
        self._readable = poller(transport, select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._head is None or self._whole:
            # An answer without a request: it must not be taken for that of the next one.
            self._stays_open = False
            self.close()
            return
        if self._parser is None:
            if self._take_plain(data):
                self._heard_s = self._loop.time()
                self._progress()
                return
            self._parser = self._general_parser()
        self._fruitless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._whole:
                self._stays_open = False
                self._progress()
                return
            # Of what a callback raises, the parser's own error says no more than that it did.
            why = str(error.__context__ or error) or type(error).__name__
            self._fail(Failure(Kind.MALFORMED, f"the engine's answer is not HTTP/1.1: {why}"))
            return
        if self._fruitless_bytes > MAX_HEAD_BYTES and not self._whole:
            self._fail(Failure(Kind.MALFORMED, f"the head of the engine's answer is over {MAX_HEAD_BYTES} bytes"))
            return
        self._progress()

    def _take_plain(self, data: bytes) -> bool:
        """Whether it is a whole answer, or the next chunks of one, that leaves nothing to judge. If not, nothing of it
        was taken."""
        start = 0
        head = None
        if not self._head_whole:
            head = plain_answer(data, MAX_HEAD_BYTES)
            if head is None:
                return False
            start = head.body_start
        parts: list[bytes] = []
        if head is not None and head.length >= 0:
            if len(data) - start != head.length:
                return False
            whole = True
            if head.length:
                parts.append(data[start:])
        else:
            ended = whole_chunks(data, start, parts)
            if ended < 0:
                return False
            whole = ended == 1
        if head is not None:
            self._status, self._reason, self._headers = head.status, head.reason, head.headers
            self._length = head.length if head.length >= 0 else None
            self._head_whole = self._stays_open = True
        self._parts += parts
        self._waiting_bytes += len(data) - start
        self._whole = whole
        return True

    def _general_parser(self) -> httptools.HttpResponseParser:
        """One that takes what follows."""
        parser = self._parser = httptools.HttpResponseParser(self)
        if self._head_whole:
            known = self._status, self._reason
            parser.feed_data(CHUNKED_HEAD)
            self._status, self._reason = known
        return parser

    def eof_received(self) -> None:
        # Now, as the socket is closed when the connection is lost. The close acknowledges all that came before it.
        assert self._transport is not None
        self._untaken_bytes = untaken_bytes(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._head is None or self._whole:
            return
        if self._until_close and exc is None:
            self._whole = True
            self._progress()
        else:
            self._fail(self._closed(exc))

    # the parser's callbacks

    def on_message_begin(self) -> None:
        if self._whole:
            # In one read with the answer's end. Nothing else keeps the parser from going on.
            raise httptools.HttpParserError("more data than one answer")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head it is a trailer, not a header (RFC 9110, 6.5.1).
        if not self._head_whole:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()
        if self._status < FIRST_FINAL_STATUS:
            self._interim_answers += 1
            if self._interim_answers > MAX_INTERIM_ANSWERS:
                raise httptools.HttpParserError(f"more than {MAX_INTERIM_ANSWERS} interim answers")
            return
        self._got_on()
        codings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]) or self._parser.get_http_version() not in VERSIONS:
            raise httptools.HttpParserError("a transfer coding other than chunked, or another version")
        self._head_whole = True
        chunked = bool(codings)
        self._length = self._announced_length()
        self._until_close = not chunked and self._length is None and self._status not in NO_CONTENT
        # Now, as the parser forgets it with the end of the message.
        self._stays_open = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._got_on()
        self._parts.append(data)
        self._waiting_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._head_whole:
            self._whole = True
        else:
            # An interim answer (1xx); the real one follows.
            self._headers, self._reason = [], b""

    def _got_on(self) -> None:
        """Something of the answer came. Interim answers, a head without an end, and trailers break no silence."""
        self._fruitless_bytes = 0
        self._heard_s = self._loop.time()

    def _progress(self) -> None:
        """After new bytes: hand on what can be handed on. Whoever waits goes on within it, so it is the last that
        happens to them."""
        head = self._head
        assert head is not None
        if self._take is not None:
            if self._parts:
                parts, self._parts = self._parts, []
                self._waiting_bytes = 0
                self._take(parts)
        elif self._waiting_bytes > MAX_WAITING_BYTES:
            self.pause()
        if not head.is_set:
            if self._head_whole and (self._parts or self._whole):
                # The parser accepts any byte there except a line's end; without a phrase, the client gets the usual
                # one.
                reason = b"" if UNPRINTABLE.search(self._reason) else self._reason
                head.set(AnswerHead(self._status, reason, self._headers, self._length))
        elif self._whole and self._end is not None:
            self._end.set(None)

    def _announced_length(self) -> int | None:
        for name, value in self._headers:
            if name == b"content-length":
                return int(value)
        return 0 if self._status in NO_CONTENT else None

    def _closed(self, exc: Exception | None = None) -> Failure:
        why = f" ({exc})" if exc is not None and str(exc) else ""
        if (self._head_whole and self._parts) or self._take is not None:
            return Failure(Kind.CUT, f"the engine closed the connection within its answer{why}")
        if self._untaken_bytes >= self._sent_bytes:
            # Nothing of the request came there.
            if self.used:
                return Failure(Kind.STALE, f"the engine closed a kept connection{why}")
            return Failure(Kind.REFUSED, f"the engine closed the connection before the request{why}")
        return Failure(Kind.RESET, f"the engine closed the connection before its answer{why}")

    def _fail(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        waiting = self._end if self._head is not None and self._head.is_set else self._head
        self.close()
        if waiting is not None:
            waiting.fail(failure)

    def _on_silence(self) -> None:
        self._timer = None
        if self._head is None or self._whole:
            return
        now = self._loop.time()
        # While nothing is read, it is not the engine that is silent.
        left_s = self._silence_s if self._paused else self._heard_s + self._silence_s - now
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_silence)
            return
        self._fail(Failure(Kind.SILENT, f"the engine sent nothing for {self._silence_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
