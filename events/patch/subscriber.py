# SPDX-License-Identifier: Apache-2.0
"""The subscriber of the engine patch's sockets, requests and reports, of one publisher: an ordered, typed stream.

It decides nothing about order (`cursor.py` does). It greets on the requests socket (`greeter.py`), connects to the
reports that the answer names, requests snapshots (`snapshot_client.py`), and judges whether the publisher is silent.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable, Iterable

import zmq

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.decode import Unreadable, read_report
from kvrouter.events.patch.greeter import Greeter
from kvrouter.events.patch.hello import reachable
from kvrouter.events.patch.items import Loaded, ReportBatch, ReportItem, ReportResume
from kvrouter.events.patch.messages import REPORT_TOPIC, Events, Heartbeat, Hello
from kvrouter.events.patch.settings import (
    DEFAULT_HEARTBEAT_S,
    MAX_HEARTBEAT_S,
    MIN_HEARTBEAT_S,
    SILENT_INTERVALS,
    ReportSettings,
)
from kvrouter.events.patch.snapshot_client import SnapshotClient
from kvrouter.events.transport.curve import CurveClient
from kvrouter.events.transport.deadline import Deadline
from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.request_client import RequestClient
from kvrouter.events.transport.subscription import Subscription
from kvrouter.events.vllm.messages import MAX_ERROR_CHARS
from kvrouter.events.vllm.wire import read_seq

log = logging.getLogger(__name__)

# Answers to greetings that may wait unread.
_ANSWERS_HWM = 100

# Faults of this process that do not pass, so the consumer must know.
_FATAL_ERRORS = frozenset((zmq.ETERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class ReportSubscriber(Subscription[ReportItem]):
    """The stream of the engine patch's reports."""

    _cursor: ReportCursor
    _settings: ReportSettings

    def __init__(
        self,
        requests_endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        resume: ReportResume | None = None,
        settings: ReportSettings | None = None,
        refusal: Callable[[str], str | None] = lambda endpoint: None,
        curve: CurveClient | None = None,
        permits: Permits | None = None,
        watch: FloodWatch | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            requests_endpoint: The address of the patch's requests socket.
            context: Makes the sockets.
            resume: Continue from this point without a snapshot, unless messages were missed.
            settings: Bounds and times of the stream.
            refusal: Returns why the endpoint that a `Hello` names must not be connected to, or None.
            curve: As in `Link`.
            permits: Shared with other subscribers, so that few snapshots are under way at once.
            watch: As in `Link`, shared with other subscribers.
        """
        settings = settings or ReportSettings()
        cursor = ReportCursor(
            resume=resume,
            max_held=settings.max_held,
            max_held_bytes=settings.max_held_bytes,
            max_snapshot_blocks=settings.max_snapshot_blocks,
        )
        super().__init__(context, settings, cursor, size_bytes=_size_bytes, curve=curve, watch=watch)
        self._endpoint = requests_endpoint
        self._refusal = refusal
        self._greeter: Greeter | None = None
        self._snapshots = SnapshotClient(
            cursor,
            lambda: self._connect(requests_endpoint, settings.answer_hwm, lasting=False),
            settings,
            permits,
            self._schedule,
        )
        self._live: Link | None = None
        # Whether this live socket had a peer before, and the time from which on it can be relied upon; None without a
        # peer.
        self._live_known = False
        self._settled_s: float | None = None
        self._interval_s = settings.heartbeat_s
        # Messages of the publisher's life so far, when that number last grew, and when it must grow again.
        self._heard = 0
        self._heard_s = -math.inf
        self._silence = Deadline(settings.grace_s)

    def request_snapshot(self, reason: str) -> None:
        """Request a snapshot, as the consumer's state disagrees with the publisher's.

        No batch follows before the next `Loaded`.
        """
        log.info("snapshot requested", extra={"endpoint": self._endpoint, "reason": reason})
        self._cursor.request_snapshot()
        self._schedule()

    def expire(self, reason: str, age_s: float) -> None:
        """Request the publisher's state again, as another source reports that the publisher may have restarted.

        The connection stays, however old it is (`age_s`), because the patch's heartbeats show a dead one.
        """
        log.info("publisher may have restarted", extra={"endpoint": self._endpoint, "reason": reason})
        self._cursor.expire()
        self._schedule()

    def _open(self) -> None:
        self._greeter = Greeter(
            self._cursor, self._connect(self._endpoint, _ANSWERS_HWM), self._settings, self._on_hello
        )
        self._on_heard()

    def _links(self) -> Iterable[Link | RequestClient | None]:
        return self._greeter.link if self._greeter else None, self._live, self._snapshots

    def _read(self) -> bool:
        assert self._greeter is not None
        live = self._live
        # Messages in the live socket are newer than a snapshot.
        self._cursor.set_unread(live is not None and live.readable())
        more = self._snapshots.read(self._now_s)
        more = self._greeter.read() or more
        live = self._live
        unread = live is not None and live.read(
            self._handle_live, self._settings.turn_messages, self._settings.turn_bytes
        )
        self._cursor.set_unread(unread)
        more = more or unread
        # The news comes last, when no message of the old connection is left.
        self._greeter.read_news()
        self._read_live_news()
        if self._cursor.heard != self._heard:
            self._on_heard()
        if not more and self._silence.has_passed(self._now_s):
            self._silence.due_s = math.inf
            self._cursor.silent(self._now_s - self._heard_s)
            # The publisher may use another endpoint by now.
            self._cursor.greeting_wanted = True
        return more

    def _act(self) -> float:
        assert self._greeter is not None
        now_s = self._now_s
        return min(self._greeter.greet(now_s), self._snapshots.request(now_s, self._settled_s), self._silence.due_s)

    def _on_heard(self) -> None:
        self._heard = self._cursor.heard
        self._heard_s = self._now_s
        self._silence.due_s = self._now_s + SILENT_INTERVALS * self._interval_s

    def _handle_live(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self._cursor.malformed(f"a report of {len(frames)} frames: expected topic, seq, payload")
        # ZMQ matches prefixes, so another topic's name may begin like ours.
        elif frames[0] == REPORT_TOPIC:
            self._handle_report(frames[1], frames[2])

    def _handle_report(self, seq_frame: bytes, payload: bytes) -> None:
        cursor = self._cursor
        seq = read_seq(seq_frame)
        if seq is None:
            cursor.malformed(f"a report with the seq {seq_frame[:16].hex()}")
            return
        if self._settled_s is not None:
            self._settled_s = -math.inf
        message = read_report(payload)
        if message is None:
            return
        if isinstance(message, Unreadable):
            cursor.malformed(f"report {seq}: {message.reason}")
            if message.uses_seq:
                cursor.unreadable(seq, message.epoch, len(payload))
        elif isinstance(message, Events):
            cursor.events(seq, message, len(payload))
        elif isinstance(message, Heartbeat):
            heard = cursor.heard
            cursor.heartbeat(seq, message, len(payload))
            if cursor.heard > heard:
                self._interval_s = _interval_s(message.interval_s)
        else:
            cursor.catalog(seq, message)

    def _on_hello(self, hello: Hello) -> None:
        self._interval_s = _interval_s(hello.heartbeat_s)
        if not self._cursor.is_silent:
            self._silence.due_s = self._heard_s + SILENT_INTERVALS * self._interval_s
        self._cursor.hello(hello)
        self._follow_reports(hello.reports)

    def _follow_reports(self, reports: str) -> None:
        """Connect the live socket to the endpoint at which the publisher now publishes."""
        endpoint = reachable(reports, self._endpoint)
        if endpoint is None:
            self._cursor.malformed(f"reports at {reports[:MAX_ERROR_CHARS]!r}: no endpoint for {self._endpoint}")
            return
        refusal = self._refusal(endpoint)
        if refusal:
            self._cursor.malformed(f"reports: {refusal[:MAX_ERROR_CHARS]}")
            return
        if self._live is not None:
            if self._live.endpoint == endpoint:
                return
            self._live.close()
            self._live = None
            self._settled_s = None
            self._cursor.disconnected()
        self._live_known = False
        try:
            self._live = self._connect(endpoint, self._settings.receive_hwm, topic=REPORT_TOPIC)
        except zmq.ZMQError as error:
            if error.errno in _FATAL_ERRORS:
                raise
            self._cursor.malformed(f"reports at {endpoint[:MAX_ERROR_CHARS]!r}: {error}")

    def _read_live_news(self) -> None:
        for is_connected in self._live.take_news() if self._live is not None else ():
            if is_connected:
                self._cursor.connected()
                self._cursor.greeting_wanted |= self._live_known
                self._live_known = True
                self._settled_s = self._now_s + self._settings.settle_s
            else:
                self._cursor.disconnected()
                self._settled_s = None


def _interval_s(announced_s: float) -> float:
    return announced_s if MIN_HEARTBEAT_S <= announced_s <= MAX_HEARTBEAT_S else DEFAULT_HEARTBEAT_S


def _size_bytes(item: ReportItem) -> int:
    if isinstance(item, ReportBatch):
        return item.size_bytes
    if isinstance(item, Loaded):
        return item.snapshot.size_bytes
    return 0
