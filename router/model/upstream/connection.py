# SPDX-License-Identifier: Apache-2.0
"""One kept HTTP/1.1 connection to an engine, with one exchange at a time.

It uses the parser that uvicorn uses (docs/adr/0013); a plain answer is read without that parser (`plain_answer.py`).
Each part of an answer's body goes to a callback at once, without a task in between. The receiver of the body can pause
the connection, which then leaves the socket unread. A connection does not retry, follow redirects or decode content.
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

# The limit for the head of an answer together with the interim answers before it, for the extensions of a chunk, and
# for trailers. Engines send a few hundred bytes.
MAX_HEAD_BYTES = 64 * 1024
# The most interim answers (1xx) before one answer; more than one of each kind is of no use.
MAX_INTERIM_ANSWERS = 8
# The most bytes of a body that are read before `relay` is called; one read of the loop returns up to this many.
MAX_WAITING_BYTES = 256 * 1024

NO_CONTENT = frozenset({204, 304})
FIRST_FINAL_STATUS = 200
VERSIONS = frozenset({"1.0", "1.1"})
# The general parser gets this head if the first chunks of an answer were read without it.
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

# Control characters. No reason phrase may contain them (RFC 9112, 4), because a terminal would act on them.
UNPRINTABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

Headers = list[tuple[bytes, bytes]]
Take = Callable[[list[bytes]], None]


class AnswerHead(msgspec.Struct, gc=False):
    """The status line and the headers of an answer."""

    status: int
    reason: bytes
    # Names are in lower case.
    headers: Headers
    # The length of the body in bytes, or None if the engine does not announce it.
    length: int | None


class Connection(asyncio.Protocol):
    """A connection to one engine. An exchange calls `ask`, then `relay`, and waits until the answer is complete.

    Before the next exchange, `reusable` must have returned True.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._readable: select.poll | None = None
        # One timer serves many exchanges: when it fires, it compares the time of the last received bytes.
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s = 0.0
        # Whether an exchange on this connection has ended before.
        self.used = False
        # The time when the connection became idle, on the loop's clock.
        self.idle_s = 0.0
        self._clear()

    def _clear(self) -> None:
        """Reset the state of the exchange."""
        # None while everything of the answer was plain.
        self._parser: httptools.HttpResponseParser | None = None
        self._head: Signal[AnswerHead] | None = None
        self._end: Signal[None] | None = None
        self._status = 0
        self._reason = b""
        self._headers: Headers = []
        self._length: int | None = None
        # Whether the head, or the whole answer, is complete; whether the end of the connection ends the body; whether
        # the connection stays open after the answer.
        self._head_whole = self._whole = self._until_close = self._stays_open = False
        # Bytes received since the last progress of the answer, see `_got_on`.
        self._fruitless_bytes = self._interim_answers = 0
        # Parts of the body that were not handed on yet, and their size.
        self._parts: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._failure: Failure | None = None
        self._take: Take | None = None
        # The time of the last progress of the answer, on the loop's clock.
        self._heard_s = 0.0
        # The size of the request, head and body.
        self._sent_bytes = 0
        # The part of the request that the engine's side had not received when it closed the connection.
        self._untaken_bytes = 0

    def ask(self, head: bytes, body: bytes, silence_s: float) -> Signal[AnswerHead]:
        """Send a request, and return a signal for the head of the answer.

        The signal is set with the first byte of the answer's body, or at the end of an answer without a body. The head
        alone is not an answer yet, because vLLM sends the head of a stream before it computes anything. Both the call
        and the signal may raise Failure.

        Args:
            head: The request line and the headers, with the empty line after them.
            body: The body of the request, which may be empty.
            silence_s: How long the engine may send nothing before the exchange fails.
        """
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
        """Hand the parts of the body to `take` as they come, and return a signal for the end of the body.

        Both the call and the signal may raise Failure, but only after `take` got all parts received before.
        """
        self._take = take
        # `take` may pause the connection again, so this comes first.
        self._unpause()
        parts, self._parts = self._parts, []
        if parts:
            take(parts)
        if self._failure is not None:
            raise self._failure
        ended: Signal[None] = Signal()
        if self._whole:
            ended.set(None)
        else:
            self._end = ended
        return ended

    def pause(self) -> None:
        """Stop reading, because the receiver of the body cannot take more for now."""
        if not self._paused and not self._whole and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again after `pause`."""
        self._heard_s = self._loop.time()
        self._unpause()

    def _unpause(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def give_up(self, failure: Failure) -> None:
        """End the exchange with `failure` if it still waits for the first byte of the answer."""
        if self._head is not None and not self._head.is_set:
            self._fail(failure)

    def close(self) -> None:
        """Abort the connection at once, so that an engine notices that its answer is not wanted."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def reusable(self) -> bool:
        """Return whether another exchange may follow the one that ended, and prepare the connection for it."""
        transport = self._transport
        if transport is None or not self._whole or self._until_close or self._failure is not None:
            return False
        # If the request was answered early, the engine would take its unsent rest for the next request.
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
        """Whether the next request may use this idle connection; it polls the kernel, which may know the end earlier."""
        transport, readable = self._transport, self._readable
        return transport is not None and readable is not None and not transport.is_closing() and not readable.poll(0)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the new connection's transport."""
        # The transports of uvloop have the interface of asyncio's transports, but not their class.
        self._transport = cast(asyncio.Transport, transport)
        self._readable = poller(transport, select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Read the next bytes of the answer; close the connection if no answer is expected."""
        if self._head is None or self._whole:
            # An answer without a request must not be taken for the answer to the next request.
            self._stays_open = False
            self.close()
            return
        if self._parser is None:
            if self._take is not None:
                if self._relay_chunks(self._take, data):
                    return
            elif self._take_plain(data):
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
            # If a callback raised, the parser's own error does not say more than that.
            why = str(error.__context__ or error) or type(error).__name__
            self._fail(Failure(Kind.MALFORMED, f"the engine's answer is not HTTP/1.1: {why}"))
            return
        if self._fruitless_bytes > MAX_HEAD_BYTES and not self._whole:
            self._fail(Failure(Kind.MALFORMED, f"the head of the engine's answer is over {MAX_HEAD_BYTES} bytes"))
            return
        self._progress()

    def _relay_chunks(self, take: Take, data: bytes) -> bool:
        """Hand on the next complete chunks of a plain answer, and return whether `data` has only those.

        If it has not, the state is unchanged. If the answer ends, the waiting task resumes within this call.
        """
        parts: list[bytes] = []
        ended = whole_chunks(data, 0, parts)
        if ended < 0:
            return False
        self._heard_s = self._loop.time()
        self._whole = ended == 1
        if parts:
            take(parts)
        if self._whole and self._end is not None:
            self._end.set(None)
        return True

    def _take_plain(self, data: bytes) -> bool:
        """Read a complete plain answer, or the next complete chunks of one, and return whether `data` is that plain.

        If it is not, the state is unchanged.
        """
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
        """Return a parser for the following bytes, which skips the head if that was read already."""
        parser = self._parser = httptools.HttpResponseParser(self)
        if self._head_whole:
            status_line = self._status, self._reason
            parser.feed_data(CHUNKED_HEAD)
            self._status, self._reason = status_line
        return parser

    def eof_received(self) -> None:
        """Note how much of the request the engine's side had not received when it closed the connection."""
        # This cannot wait for connection_lost, when the socket is closed. The engine's close acknowledges all bytes
        # that came before it.
        assert self._transport is not None
        self._untaken_bytes = untaken_bytes(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete an answer that the end of the connection ends; fail any other exchange under way."""
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
        """Refuse a second answer."""
        if self._whole:
            # The second answer came in one read with the end of the first. Only an error stops the parser.
            raise httptools.HttpParserError("more data than one answer")

    def on_status(self, reason: bytes) -> None:
        """Collect a part of the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        # A field after the head is a trailer, not a header (RFC 9110, 6.5.1).
        if not self._head_whole:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Judge the head: its version, its transfer coding, and how its body ends."""
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
        # This cannot wait, because the parser forgets it at the end of the message.
        self._stays_open = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Collect a part of the body."""
        self._got_on()
        self._parts.append(data)
        self._waiting_bytes += len(data)

    def on_message_complete(self) -> None:
        """Note the end of the answer, or drop an interim answer."""
        if self._head_whole:
            self._whole = True
        else:
            # This was an interim answer (1xx); the final one follows.
            self._headers, self._reason = [], b""

    def _got_on(self) -> None:
        """Note progress of the answer.

        Interim answers, an unfinished head and trailers are no progress, so they do not end the engine's silence.
        """
        self._fruitless_bytes = 0
        self._heard_s = self._loop.time()

    def _progress(self) -> None:
        """Hand on what the new bytes completed: parts of the body, the head, or the end.

        The waiting task resumes synchronously within this call, so the call must be the last statement of its caller.
        """
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
                # The parser accepts any byte in a reason phrase except the end of a line. If the phrase is dropped, the
                # client gets the usual one.
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
            # The engine's side received no byte of the request.
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
        # While reading is paused, silence does not come from the engine.
        left_s = self._silence_s if self._paused else self._heard_s + self._silence_s - now
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_silence)
            return
        self._fail(Failure(Kind.SILENT, f"the engine sent nothing for {self._silence_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
