# SPDX-License-Identifier: Apache-2.0
"""The last decisions of this process, by the id of the selection and of the request, with what came of them.

Bounded by number and by bytes; the oldest go first. A decision is kept as bytes, so that ten thousand of them are
nothing that the garbage collector looks at. Belongs to one loop.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.feed.fleet_event import EventType, FleetEvent
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.observe.decisions.decision import Decision, Outcome, decision_of
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.placement_request import PlacementRequest

# Ten thousand decisions among sixteen workers take 15 MB, among 64 or more 50 MB.
MAX_BYTES = 32 * 1024**2
# Decisions a second that `GET /events` shows of one process: more than anybody reads.
SHOWN_PER_S = 20.0
# Attempts of one request that are kept by its id.
MAX_ATTEMPTS = 8
# Of a request's id; longer ones are a client's mistake, and are not found.
MAX_ID_CHARS = 256
# Of the entry in the tables and its ids.
ENTRY_BYTES = 600

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Decision).decode
_decode_event = msgspec.msgpack.Decoder(FleetEvent).decode


class KeptDecision(msgspec.Struct, gc=False):
    """One decision as it stands in the log. data: a `Decision` as MessagePack."""

    data: bytes
    request_id: str = ""
    outcome: Outcome | None = None

    def decision(self) -> Decision:
        return _decode(self.data)


class DecisionLog:
    """max_kept: decisions; 0: none is kept. clock: seconds, monotonic."""

    def __init__(
        self,
        max_kept: int,
        feed: EventFeed,
        clock: Callable[[], float],
        metrics: WatchMetrics,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._feed = feed
        self._clock = clock
        self._kept: OrderedDict[str, KeptDecision] = OrderedDict()
        # The selections of each request, the last attempt last.
        self._of_request: dict[str, list[str]] = {}
        self._bytes = 0
        # Shows the others' watchers what this process decides.
        self.send_notice: Callable[[bytes], None] = lambda notice: None
        self._show_at_s = clock()
        self._skipped = 0
        metrics.decisions_kept.set_function(lambda: len(self._kept))
        metrics.decisions_bytes.set_function(lambda: self._bytes)

    def record(self, selection_id: str, ask: PlacementRequest, choice: Choice) -> None:
        """A request was placed, or a worker chosen for one. choice: with its comparison."""
        if self._max_kept:
            # Text that is no UTF-8 cannot be shown either.
            with contextlib.suppress(UnicodeEncodeError):
                self._keep(selection_id, _encode(decision_of(selection_id, self._feed.now(), ask, choice)))
        now = self._clock()
        if now < self._show_at_s:
            self._skipped += 1
            return
        self._show_at_s = now + 1 / SHOWN_PER_S
        event = self._event(selection_id, ask, choice)
        self._feed.publish(event)
        with contextlib.suppress(UnicodeEncodeError):
            self.send_notice(_encode(event))
        self._skipped = 0

    def take_notice(self, notice: bytes) -> None:
        """A decision of another process; what cannot be read is left out, as Redis is anybody's."""
        try:
            event = _decode_event(notice)
        except (msgspec.MsgspecError, ValueError):
            return
        if event.type is EventType.DECISION:
            self._feed.publish(event)

    def _event(self, selection_id: str, ask: PlacementRequest, choice: Choice) -> FleetEvent:
        hit = choice.hit
        return FleetEvent(
            EventType.DECISION,
            self._feed.now(),
            *hit.worker,
            reason=choice.reason,
            selection_id=selection_id,
            num_tokens=ask.question.num_tokens,
            predicted_tokens=hit.disk,
            best_tokens=choice.best_hit_tokens,
            lost_by=choice.lost or msgspec.UNSET,
            skipped=self._skipped or msgspec.UNSET,
        )

    def _keep(self, selection_id: str, data: bytes) -> None:
        self._drop(selection_id)
        self._kept[selection_id] = KeptDecision(data)
        self._bytes += len(data) + ENTRY_BYTES
        while len(self._kept) > self._max_kept or self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, selection_id: str) -> None:
        kept = self._kept.pop(selection_id, None)
        if kept is None:
            return
        self._bytes -= len(kept.data) + ENTRY_BYTES
        attempts = self._of_request.get(kept.request_id, [])
        if selection_id in attempts:
            attempts.remove(selection_id)
            if not attempts:
                del self._of_request[kept.request_id]

    def name(self, selection_id: str, request_id: str) -> None:
        """The request that it was made for."""
        kept = self._kept.get(selection_id)
        if kept is None or kept.request_id or not 0 < len(request_id) <= MAX_ID_CHARS:
            return
        kept.request_id = request_id
        attempts = self._of_request.setdefault(request_id, [])
        attempts.append(selection_id)
        # A client that sends one id with all its requests.
        del attempts[:-MAX_ATTEMPTS]

    def end(self, selection_id: str, outcome: Outcome) -> None:
        """What came of it."""
        kept = self._kept.get(selection_id)
        if kept is not None:
            kept.outcome = outcome

    def find(self, name: str) -> tuple[KeptDecision, list[str]] | None:
        """By the id of its selection, or of its request: then the last attempt, and the selections of those before
        it."""
        kept = self._kept.get(name)
        if kept is not None:
            return kept, []
        attempts = self._of_request.get(name)
        return None if attempts is None else (self._kept[attempts[-1]], attempts[:-1])

    def last(self, most: int) -> Iterator[KeptDecision]:
        """The newest first."""
        for _, kept in zip(range(most), reversed(self._kept.values()), strict=False):
            yield kept
