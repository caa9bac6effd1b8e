# SPDX-License-Identifier: Apache-2.0
"""The sender of the replay request that a cursor wants, and the reader of its answer."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.request_client import RequestClient
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.wire import END_SEQ, SEQ_BYTES, read_seq


class ReplayClient(RequestClient):
    """A client with at most one replay under way."""

    def __init__(
        self,
        cursor: Cursor,
        connect: Callable[[], Link],
        settings: SubscriberSettings,
        permits: Permits | None,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(connect, settings, permits, wake)
        self._cursor = cursor

    def request(self, now_s: float) -> float:
        """Send the request that the cursor wants, replacing an earlier one. Returns when the answer is overdue."""
        request = self._cursor.request
        if self._number != self._wanted():
            self.close()
        if request is not None and self._link is None:
            self._send(now_s, b"", request.start.to_bytes(SEQ_BYTES, "big"))
        return self._deadline.due_s

    def _wanted(self) -> int:
        return self._cursor.request.number if self._cursor.request is not None else 0

    def _handle(self, frames: list[bytes], now_s: float) -> None:
        cursor = self._cursor
        self._extend(now_s)
        # vLLM before 0.26 sends no topic.
        if len(frames) not in (3, 4) or frames[0] != b"":
            cursor.malformed(f"a replay message of {len(frames)} frames: expected an empty one, topic, seq, payload")
        elif frames[-2] == END_SEQ:
            cursor.replay_ended()
        elif (seq := read_seq(frames[-2])) is not None:
            cursor.replayed(seq, frames[-1])
        else:
            cursor.malformed(f"a replay message with the seq {frames[-2][:16].hex()}")

    def _fail(self, reason: str) -> None:
        self._cursor.replay_failed(reason)

    def _give_up(self) -> None:
        self._cursor.replay_overdue()
