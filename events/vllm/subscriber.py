# SPDX-License-Identifier: Apache-2.0
"""The subscriber of vLLM's sockets, live and replay, of one publisher: an ordered, typed stream.

It decides nothing about order (`batch_cursor.py` does) and decodes nothing. One subscriber follows one publisher;
several publishers behind one endpoint are not distinguished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import zmq

from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.request_client import RequestClient
from kvrouter.events.transport.subscription import Subscription
from kvrouter.events.vllm.batch_cursor import Cursor, Finding
from kvrouter.events.vllm.replay_client import ReplayClient
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Batch, ResumePoint, StreamItem
from kvrouter.events.vllm.wire import read_seq


class Subscriber(Subscription[StreamItem]):
    """The stream of vLLM's own events."""

    _cursor: Cursor
    _settings: SubscriberSettings

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        topic: bytes = b"",
        resume: ResumePoint | None = None,
        settings: SubscriberSettings | None = None,
        permits: Permits | None = None,
        watch: FloodWatch | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            endpoint: The address of the live stream.
            replay_endpoint: The address for replays; None if the engine has none.
            context: Makes the sockets.
            topic: Prefix, as ZMQ matches it.
            resume: Continue from this point, if it can be proven.
            settings: Bounds and times of the stream.
            permits: Shared with other subscribers, so that few replays are under way at once.
            watch: As in `Link`, shared with other subscribers.
        """
        settings = settings or SubscriberSettings()
        cursor = Cursor(
            replay=replay_endpoint is not None,
            resume=resume,
            max_held=settings.max_held,
            max_held_bytes=settings.max_held_bytes,
        )
        super().__init__(context, settings, cursor, size_bytes=_size_bytes, watch=watch)
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._live: Link | None = None
        self._replay = ReplayClient(cursor, self._connect_replay, settings, permits, self._schedule)
        self._heard_s = -math.inf
        # When the connection of the live socket began.
        self._connected_s = -math.inf
        # When to check for missed batches, and how long the stream must have been quiet by then.
        self._check_due_s = math.inf
        self._quiet_s = 0.0
        self._reopen_due_s = math.inf

    def expire(self, reason: str, age_s: float) -> None:
        """Read the whole ring again, as another source reports that the publisher may have restarted.

        A connection that is older than `age_s`, when the former process was last seen, can lead to a machine that died
        without a word, so it is opened again.
        """
        if self._loop is not None and self._loop.time() - self._connected_s > age_s:
            self._leave()
        self._cursor.expire(reason)
        self._schedule()

    def _leave(self) -> None:
        """Have the connection of the live socket opened again."""
        self._cursor.disconnected()
        self._reopen_due_s = -math.inf

    def _open(self) -> None:
        if self._replay_endpoint is not None:
            # This raises for a bad endpoint now, not at the first gap.
            self._connect_replay().close()
        self._open_live()

    def _links(self) -> Iterable[Link | RequestClient | None]:
        return self._live, self._replay

    def _open_live(self) -> None:
        self._live = self._connect(self._endpoint, self._settings.receive_hwm, topic=self._topic)

    def _connect_replay(self) -> Link:
        assert self._replay_endpoint is not None
        return self._connect(self._replay_endpoint, self._settings.answer_hwm, lasting=False)

    def _read(self) -> bool:
        assert self._live is not None
        # Messages in the live socket are newer than the end of a replay.
        self._cursor.set_unread(self._live.readable())
        more = self._replay.read(self._now_s)
        if self._live.read(self._handle_live, self._settings.turn_messages, self._settings.turn_bytes):
            return True
        self._cursor.set_unread(False)
        # The news comes last, when no message of the old connection is left: none may count for the new connection.
        self._read_news(self._live)
        if self._is_dead(self._cursor.take_finding()):
            self._leave()
        return more

    def _is_dead(self, finding: Finding | None) -> bool:
        """Return whether the live connection may lead to a machine that died without a word, by what a replay showed.

        Such a connection stays until ZMQ's pings find out, while the machine that came back, or another one at its address,
        answers replays: the worker would be live, and its batches late.
        """
        # Messages that PUB dropped, or that the replay endpoint names a moment before they arrive, prove nothing.
        silent_s = self._now_s - max(self._connected_s, self._heard_s)
        is_unheard = finding is Finding.BATCHES and 0 < self._settings.idle_check_s <= silent_s
        return finding is Finding.SUCCESSOR or is_unheard

    def _handle_live(self, frames: list[bytes]) -> None:
        self._heard_s = self._now_s
        if len(frames) != 3:
            self._cursor.malformed(f"a live message of {len(frames)} frames: expected topic, seq, payload")
            return
        seq = read_seq(frames[1])
        if seq is None:
            self._cursor.malformed(f"a live message with the seq {frames[1][:16].hex()}")
        else:
            self._cursor.live(seq, frames[2])

    def _read_news(self, live: Link) -> None:
        for is_connected in live.take_news():
            if is_connected:
                self._connected_s, self._reopen_due_s = self._now_s, math.inf
                self._cursor.connected()
                if self._replay_endpoint is not None:
                    self._check_due_s = self._now_s + self._settings.settle_s
                    self._quiet_s = 0.0
            else:
                self._cursor.disconnected()
                self._reopen_due_s = self._now_s + self._settings.reopen_s

    def _act(self) -> float:
        now_s, settings = self._now_s, self._settings
        if now_s >= self._reopen_due_s:
            # ZMQ reconnects without help, but never after a message over the limit or another breach of its protocol.
            assert self._live is not None
            self._live.close()
            self._open_live()
            self._reopen_due_s = now_s + settings.reopen_s
        if now_s >= self._check_due_s:
            checked_s = self._heard_s
            if self._cursor.degraded or now_s - self._heard_s >= self._quiet_s:
                self._cursor.check()
                checked_s = now_s
            self._quiet_s = settings.idle_check_s
            self._check_due_s = checked_s + settings.idle_check_s if settings.idle_check_s > 0 else math.inf
        return min(self._replay.request(now_s), self._check_due_s, self._reopen_due_s)


def _size_bytes(item: StreamItem) -> int:
    return len(item.payload) if isinstance(item, Batch) else 0
