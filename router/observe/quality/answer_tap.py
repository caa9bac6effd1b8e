# SPDX-License-Identifier: Apache-2.0
"""A tap between an engine's answer and its client: it passes all bytes on first, and then examines them.

It is called once for each read of the engine's socket and takes some microseconds (benchmarks/answer_tap.py). This
module is compiled, see `setup.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.router.observe.quality.concurrency import Flight
from kvrouter.router.observe.quality.response_id import ResponseIdReader
from kvrouter.router.observe.quality.usage_reader import Usage, UsageReader
from kvrouter.router.route.tokens.proxied_paths import USAGE_KEY

log = logging.getLogger("kvrouter.quality")

Send = Callable[[list[bytes]], None]


class AnswerTap:
    """The tap through which one answer passes to the client. Times are those of `clock`.

    `first_s` is the time of the first bytes, or of a stream's first event; None until then. `was_alone` is whether,
    until that time, this process had no other request at the worker.
    """

    def __init__(
        self,
        send: Send,
        clock: Callable[[], float],
        flight: Flight,
        *,
        streams: bool,
        readable: bool,
        usage_key: bytes = USAGE_KEY,
    ) -> None:
        """Create the observer of one answer's bytes.

        Args:
            send: Passes the bytes on.
            clock: Returns the current time in seconds.
            flight: The request at its worker.
            streams: Whether the answer consists of events, whose times are measured.
            readable: Whether the bytes are not compressed, so that they can be read here.
            usage_key: The key of the engine's report of usage.
        """
        self._send = send
        self._clock = clock
        self._flight = flight
        self._streams = streams
        self._reader = UsageReader(streams=streams, key=usage_key) if readable else None
        # The reader of the response's id until it has ended, None if there is none.
        self._ids: ResponseIdReader | None = None
        self.first_s: float | None = None
        # The time of the last event, and the longest time between two.
        self.last_s = 0.0
        self.pause_s = 0.0
        self.was_alone = False

    def __call__(self, parts: list[bytes]) -> None:
        """Pass bytes on, and then examine them."""
        self._send(parts)
        if self._ids is not None:
            self._read_id(self._ids, parts)
        now = self._clock()
        reader, first_s = self._reader, self.first_s
        if reader is not None:
            try:
                events = reader.feed(parts)
            except Exception:
                # A bug of the reader must not break an answer.
                log.exception("an answer's usage cannot be read")
                self._reader, events = None, 1
            if self._streams and not events:
                return
        if first_s is None:
            self.first_s = now
            self.was_alone = self._flight.was_alone
        elif now - self.last_s > self.pause_s:
            self.pause_s = now - self.last_s
        self.last_s = now

    def name_response(self, found: Callable[[str], None], missed: Callable[[], None]) -> None:
        """Call `found` with the id of the response as soon as it has passed, or `missed` if it cannot be read."""
        if self._reader is None:
            missed()
        else:
            self._ids = ResponseIdReader(found, missed, streams=self._streams)

    def _read_id(self, reader: ResponseIdReader, parts: list[bytes]) -> None:
        try:
            if reader.feed(parts):
                self._ids = None
        except Exception:
            # A bug of the reader must not break an answer.
            log.exception("the id of a response cannot be read")
            self._ids = None

    @property
    def readable(self) -> bool:
        """Whether the answer's usage can be read."""
        return self._reader is not None

    @property
    def events(self) -> int:
        """The number of events with data so far."""
        return 0 if self._reader is None else self._reader.events

    @property
    def done(self) -> bool:
        """Whether a stream has announced its end, which it does before its bytes end."""
        return self._reader is not None and self._reader.done

    @property
    def failed(self) -> bool:
        """Whether a stream has reported that the engine failed."""
        return self._reader is not None and self._reader.failed

    def usage(self) -> Usage | None:
        """Return the usage that the answer reports; None if there is none."""
        return None if self._reader is None else self._reader.usage()
