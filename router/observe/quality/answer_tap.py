# SPDX-License-Identifier: Apache-2.0
"""Between an engine's answer and its client: passes every byte on first, and then looks at it.

One call for each read of the engine's socket, some microseconds (benchmarks/answer_tap.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.router.observe.quality.concurrency import Flight
from kvrouter.router.observe.quality.usage_reader import Usage, UsageReader

log = logging.getLogger("kvrouter.quality")

Send = Callable[[list[bytes]], None]


class AnswerTap:
    """One answer's. Times are the clock's, None until there are any. alone: of the flight, when its first bytes
    came."""

    __slots__ = ("_clock", "_flight", "_reader", "_send", "_streams", "first_s", "last_s", "pause_s", "uncontested")

    def __init__(
        self, send: Send, clock: Callable[[], float], flight: Flight, *, streams: bool, readable: bool
    ) -> None:
        """streams: it has events, and their times say something. readable: what passes is what was said, and not
        compressed."""
        self._send = send
        self._clock = clock
        self._flight = flight
        self._streams = streams
        self._reader = UsageReader(streams=streams) if readable else None
        self.first_s: float | None = None
        # Of the last event, and the longest time between two.
        self.last_s = 0.0
        self.pause_s = 0.0
        self.uncontested = False

    def __call__(self, parts: list[bytes]) -> None:
        self._send(parts)
        now = self._clock()
        reader, first_s = self._reader, self.first_s
        if reader is not None:
            try:
                events = reader.feed(parts)
            except Exception:
                # A defect of ours must not break an answer.
                log.exception("an answer's usage cannot be read")
                self._reader, events = None, 1
            if self._streams and not events:
                return
        if first_s is None:
            self.first_s = now
            self.uncontested = self._flight.uncontested
        elif now - self.last_s > self.pause_s:
            self.pause_s = now - self.last_s
        self.last_s = now

    @property
    def readable(self) -> bool:
        return self._reader is not None

    @property
    def events(self) -> int:
        return 0 if self._reader is None else self._reader.events

    @property
    def done(self) -> bool:
        """Whether a stream has said that it is over, which it does before its bytes end."""
        return self._reader is not None and self._reader.done

    @property
    def failed(self) -> bool:
        """Return whether a stream has reported that the engine failed."""
        return self._reader is not None and self._reader.failed

    def usage(self) -> Usage | None:
        return None if self._reader is None else self._reader.usage()
