# SPDX-License-Identifier: Apache-2.0
"""The sender of the snapshot request that a cursor wants, and the reader of its answer."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.decode import Unreadable, read_answer
from kvrouter.events.patch.messages import Refused, SnapshotPart, SnapshotRequest
from kvrouter.events.patch.settings import ReportSettings
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.request_client import RequestClient
from kvrouter.events.vllm.messages import MAX_ERROR_CHARS

# The doublings of a pause; its maximum is reached before.
_MAX_DOUBLINGS = 16


class SnapshotClient(RequestClient):
    """A client with at most one snapshot under way.

    After a failure the client waits, twice as long each time, or as long as a refusal says.
    """

    def __init__(
        self,
        cursor: ReportCursor,
        connect: Callable[[], Link],
        settings: ReportSettings,
        permits: Permits | None,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(connect, settings, permits, wake)
        self._cursor = cursor
        self._pause_s = settings.snapshot_pause_s
        self._max_pause_s = settings.max_snapshot_pause_s
        self._requested_s = -math.inf
        # The time until which the publisher refuses requests.
        self._retry_s = -math.inf

    def request(self, now_s: float, settled_s: float | None) -> float:
        """Send the request that the cursor wants, if it is time. Returns when to call again.

        `settled_s` is the time from which on the live socket misses nothing; None if it has no peer.
        """
        cursor = self._cursor
        if self._number != self._wanted():
            self.close()
        if self._link is not None:
            return self._deadline.due_s
        if cursor.request is None or settled_s is None:
            self.close()
            return math.inf
        doubled_s = self._pause_s * float(1 << min(cursor.failures, _MAX_DOUBLINGS))
        due_s = max(settled_s, self._requested_s + min(doubled_s, self._max_pause_s), self._retry_s)
        if now_s < due_s:
            return due_s
        if self._send(now_s, b"", msgspec.msgpack.encode(SnapshotRequest(cursor.request))):
            self._requested_s = now_s
            cursor.on_request_sent()
        return self._deadline.due_s

    def _wanted(self) -> int:
        return self._cursor.request or 0

    def _handle(self, frames: list[bytes], now_s: float) -> None:
        cursor = self._cursor
        reply = read_answer(frames)
        if isinstance(reply, Unreadable):
            cursor.malformed(f"an answer: {reply.reason}")
            cursor.snapshot_failed("an answer that cannot be read")
        elif isinstance(reply, SnapshotPart) and reply.id == self._number:
            self._extend(now_s)
            cursor.part(reply)
        elif isinstance(reply, Refused) and reply.id == self._number:
            cursor.snapshot_failed(f"refused: {reply.reason[:MAX_ERROR_CHARS]}")
            wait_s, most_s = reply.retry_s, self._max_pause_s
            # A refusal without `retry_s` means "never", but a restart of the engine may end that.
            self._retry_s = now_s + (wait_s if wait_s is not None and 0 <= wait_s <= most_s else most_s)

    def _fail(self, reason: str) -> None:
        self._cursor.snapshot_failed(reason)

    def _give_up(self) -> None:
        self._cursor.snapshot_overdue()
