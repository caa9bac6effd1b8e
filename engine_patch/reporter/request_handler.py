# SPDX-License-Identifier: Apache-2.0
"""Answers requests: with a hello, a snapshot, or a refusal.

It has no sockets: `reply` sends a payload and returns the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.reporter.report_stream import ReportStream
from kvrouter.engine_patch.reporter.snapshots import Moment, Sent, SnapshotService
from kvrouter.engine_patch.setup.settings import ReporterSettings
from kvrouter.events.patch.messages import Hello, HelloRequest, Refused, Reply, Request

# Errors that decoding hostile bytes can raise: msgspec's errors are ValueErrors only since msgspec 0.22,
# UnicodeDecodeError is one, and deep nesting is a RecursionError.
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)

# Replies that may wait for clients without room, as while a snapshot is on its way to them: some for each of a few
# clients.
MAX_UNSENT = 64


class _AnyRequest(msgspec.Struct):
    id: int
    type: str


_request = msgspec.msgpack.Decoder(Request)
_any_request = msgspec.msgpack.Decoder(_AnyRequest)


class RequestHandler:
    """The handler of requests about one stream, which also serves its snapshots.

    Each `now_s` is in monotonic seconds.
    """

    def __init__(
        self,
        stream: ReportStream,
        hello: Callable[[int], Hello],
        reply: Callable[[bytes, bytes], Sent],
        settings: ReporterSettings,
        counters: Counters,
    ) -> None:
        self._stream = stream
        self._hello = hello
        self._reply = reply
        self._retry_s = settings.retry_s
        self._timeout_s = settings.snapshot_timeout_s
        self._counters = counters
        self._snapshots = SnapshotService(
            reply, max_clients=settings.max_snapshots, timeout_s=settings.snapshot_timeout_s, counters=counters
        )
        self._encoder = msgspec.msgpack.Encoder()
        # (address, payload, when it was first tried), oldest first.
        self._unsent: deque[tuple[bytes, bytes, float]] = deque()

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way or a reply waits."""
        return len(self._snapshots) > 0 or len(self._unsent) > 0

    def answer(self, frames: Sequence[bytes], now_s: float) -> None:
        """Answer one request, whose frames are (address, b"", payload).

        Other frames are counted and, if they have an id, refused.
        """
        if len(frames) != 3 or frames[1]:
            self._counters.bad_requests += 1
            return
        address, _, payload = frames
        try:
            request = _request.decode(payload)
        except _DECODE_ERRORS:
            self._refuse_unreadable(address, payload, now_s)
            return
        if isinstance(request, HelloRequest):
            self._send(address, self._hello(request.id), now_s)
        elif not self._snapshots.request(
            address, request.id, self._stream.epoch, self._stream.next_seq, self._freeze, now_s
        ):
            self._counters.snapshots_refused += 1
            self._send(address, Refused(request.id, "too many snapshots under way", self._retry_s), now_s)

    def turn(self, now_s: float) -> bool:
        """Try the waiting replies again and send at most one part of a snapshot; return whether a part was sent."""
        for _ in range(len(self._unsent)):
            self._try(*self._unsent.popleft(), now_s)
        return self._snapshots.turn(now_s)

    def void(self, epoch: str, now_s: float) -> None:
        """End the snapshots of the former epoch, because `epoch` began."""
        for address, request_id in self._snapshots.void():
            self._counters.snapshots_refused += 1
            self._send(address, Refused(request_id, f"a new epoch began: {epoch}", self._retry_s), now_s)

    def _freeze(self) -> Moment:
        stream = self._stream
        return Moment(stream.epoch, stream.started_s, stream.next_seq, stream.ledger.freeze())

    def _refuse_unreadable(self, address: bytes, payload: bytes, now_s: float) -> None:
        self._counters.bad_requests += 1
        try:
            request = _any_request.decode(payload)
        except _DECODE_ERRORS:
            return
        self._send(address, Refused(request.id, f"not a request of this version: {request.type[:64]!r}"), now_s)

    def _send(self, address: bytes, reply: Reply, now_s: float) -> None:
        self._try(address, self._encoder.encode(reply), now_s, now_s)

    def _try(self, address: bytes, payload: bytes, since_s: float, now_s: float) -> None:
        outcome = self._reply(address, payload)
        if outcome is Sent.YES:
            return
        if outcome is Sent.FULL and now_s - since_s <= self._timeout_s and len(self._unsent) < MAX_UNSENT:
            self._unsent.append((address, payload, since_s))
        else:
            self._counters.replies_unsent += 1
