# SPDX-License-Identifier: Apache-2.0
"""The last decisions of this process with their outcomes, by the id of the selection and of the request.

Bounded by number and by bytes; the oldest are dropped first. A decision is kept as bytes, so that ten thousand of them
give the garbage collector nothing to scan. Belongs to one loop.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import msgspec

from kvrouter.contract.decisions import Outcome, Wanted
from kvrouter.contract.fleet_event import EventType, FleetEvent
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.observe.decisions.decision import Decision, decision_of
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.placement_request import PlacementRequest

# Ten thousand decisions among sixteen workers take 15 MB, among 64 or more 50 MB.
MAX_BYTES = 32 * 1024**2
# How many decisions of one process `GET /events` shows: per second on average, and at once after a pause. The first is
# more than a person can read; the second covers all decisions that arrive together at a router with little traffic.
SHOWN_PER_S = 20.0
SHOWN_BURST = 20
# How many kept decisions one search examines, the newest first: as many as are kept by default. Each takes up to 1 us,
# during which the process answers nothing else.
MAX_SEARCHED = 10_000
# How many attempts of one request are kept by its id.
MAX_ATTEMPTS = 8
# The limit of a request's id; a longer one is a client's mistake, and its decisions cannot be found by it.
MAX_ID_CHARS = 256
# The size of a decision's entry in the tables, with its ids.
ENTRY_BYTES = 600

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Decision).decode
_decode_event = msgspec.msgpack.Decoder(FleetEvent).decode


class DecisionFilter(msgspec.Struct, frozen=True):
    """The criteria for the decisions that a client wants to see. A field that is None admits all decisions."""

    # The id of the chosen worker, or its name in routes.
    worker: str | None = None
    model: str | None = None
    only: Wanted | None = None

    def wants(self, kept_decision: KeptDecision) -> bool:
        """Return whether the decision meets all criteria."""
        worker, outcome = kept_decision.worker, kept_decision.outcome
        if self.worker is not None and self.worker not in (worker.worker_id, worker.route_name):
            return False
        if self.model is not None and self.model != worker.model:
            return False
        match self.only:
            case None:
                return True
            case Wanted.LOST:
                return kept_decision.is_lost
            case Wanted.FAILED:
                return outcome is not None and outcome.failed
            case Wanted.WRONG:
                return (
                    outcome is not None
                    and None not in (outcome.predicted_tokens, outcome.delivered_tokens)
                    and outcome.predicted_tokens != outcome.delivered_tokens
                )


class KeptDecision(msgspec.Struct, gc=False):
    """One decision as it stands in the log. `data` is a `Decision` as MessagePack."""

    data: bytes
    # The chosen worker. It is kept beside `data`, like `is_lost`, so that a search need not decode the data.
    worker: WorkerKey
    # Whether another worker would reuse more than the chosen one.
    is_lost: bool
    request_id: str = ""
    outcome: Outcome | None = None
    # Whether an event announced the decision, so that another event will announce its outcome.
    is_shown: bool = False

    def decision(self) -> Decision:
        """Return the decoded decision."""
        return _decode(self.data)


EVERY = DecisionFilter()


def known(number: int | None) -> int | msgspec.UnsetType:
    """Return the number as a field of an event, or UNSET for None, which leaves the field out."""
    return msgspec.UNSET if number is None else number


class DecisionLog:
    """A log of decisions and their outcomes."""

    def __init__(
        self,
        max_kept: int,
        feed: EventFeed,
        clock: Callable[[], float],
        metrics: WatchMetrics,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Create an empty log.

        Args:
            max_kept: How many decisions are kept; 0: none.
            feed: Receives a sample of the decisions as events.
            clock: Returns monotonic seconds.
            metrics: Shows how many decisions are kept.
            max_bytes: The limit of all kept decisions together.
        """
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._feed = feed
        self._clock = clock
        self._kept_decisions: OrderedDict[str, KeptDecision] = OrderedDict()
        # The selections of each request, the last attempt last.
        self._of_request: dict[str, list[str]] = {}
        self._bytes = 0
        # Sends an event of this process to the watchers of the other processes.
        self.send_notice: Callable[[bytes], None] = lambda notice: None
        # A token bucket: the time at which it will be full again.
        self._full_at_s = clock()
        self._skipped = 0
        metrics.decisions_kept.set_function(lambda: self.num_kept)
        metrics.decisions_bytes.set_function(lambda: self._bytes)

    @property
    def num_kept(self) -> int:
        """The number of kept decisions."""
        return len(self._kept_decisions)

    def record(self, selection_id: str, request: PlacementRequest, choice: Choice) -> None:
        """Record the decision to send a request to a worker. `choice` must have its comparison."""
        kept_decision: KeptDecision | None = None
        if self._max_kept:
            # Text that is not valid UTF-8 could not be shown either.
            with contextlib.suppress(UnicodeEncodeError):
                data = _encode(decision_of(selection_id, self._feed.now(), request, choice))
                kept_decision = KeptDecision(data, choice.hit.worker, bool(choice.lost))
                self._keep(selection_id, kept_decision)
                self.name(selection_id, request.request_id)
        now = self._clock()
        full_at_s = max(now, self._full_at_s) + 1 / SHOWN_PER_S
        if full_at_s > now + SHOWN_BURST / SHOWN_PER_S:
            self._skipped += 1
            return
        self._full_at_s = full_at_s
        self._publish(self._event(selection_id, request, choice))
        self._skipped = 0
        if kept_decision is not None:
            kept_decision.is_shown = True

    def take_notice(self, notice: bytes) -> None:
        """Publish a decision of another process, or the outcome of one.

        Bytes that cannot be decoded are ignored, because any program may write to Redis.
        """
        try:
            event = _decode_event(notice)
        except (msgspec.MsgspecError, ValueError):
            return
        if event.type in (EventType.DECISION, EventType.OUTCOME):
            self._feed.publish(event)

    def _publish(self, event: FleetEvent) -> None:
        """Publish an event here, and in the other processes."""
        self._feed.publish(event)
        with contextlib.suppress(UnicodeEncodeError):
            self.send_notice(_encode(event))

    def _event(self, selection_id: str, request: PlacementRequest, choice: Choice) -> FleetEvent:
        hit = choice.hit
        return FleetEvent(
            EventType.DECISION,
            self._feed.now(),
            *hit.worker,
            reason=choice.reason,
            selection_id=selection_id,
            num_tokens=request.question.num_tokens,
            predicted_tokens=hit.tokens,
            best_tokens=choice.best_hit_tokens,
            lost_by=choice.lost or msgspec.UNSET,
            skipped=self._skipped or msgspec.UNSET,
        )

    def _outcome_event(self, selection_id: str, worker: WorkerKey, outcome: Outcome) -> FleetEvent:
        return FleetEvent(
            EventType.OUTCOME,
            self._feed.now(),
            *worker,
            selection_id=selection_id,
            predicted_tokens=known(outcome.predicted_tokens),
            delivered_tokens=known(outcome.delivered_tokens),
            outcome=outcome.outcome,
            status=known(outcome.status),
            failed=outcome.failed,
            e2e_s=outcome.e2e_s,
        )

    def _keep(self, selection_id: str, kept_decision: KeptDecision) -> None:
        self._drop(selection_id)
        self._kept_decisions[selection_id] = kept_decision
        self._bytes += len(kept_decision.data) + ENTRY_BYTES
        while len(self._kept_decisions) > self._max_kept or self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept_decisions)))

    def _drop(self, selection_id: str) -> None:
        kept_decision = self._kept_decisions.pop(selection_id, None)
        if kept_decision is None:
            return
        self._bytes -= len(kept_decision.data) + ENTRY_BYTES
        attempts = self._of_request.get(kept_decision.request_id, [])
        if selection_id in attempts:
            attempts.remove(selection_id)
            if not attempts:
                del self._of_request[kept_decision.request_id]

    def name(self, selection_id: str, request_id: str) -> None:
        """Record the id of the request for which the decision was made."""
        kept_decision = self._kept_decisions.get(selection_id)
        if kept_decision is None or kept_decision.request_id or not 0 < len(request_id) <= MAX_ID_CHARS:
            return
        kept_decision.request_id = request_id
        attempts = self._of_request.setdefault(request_id, [])
        attempts.append(selection_id)
        # Only the last attempts stay, because a client may send one id with all its requests.
        del attempts[:-MAX_ATTEMPTS]

    def end(self, selection_id: str, outcome: Outcome) -> None:
        """Record the outcome of the decision's request. A later outcome of the same decision replaces it."""
        kept_decision = self._kept_decisions.get(selection_id)
        if kept_decision is None:
            return
        former, kept_decision.outcome = kept_decision.outcome, outcome
        is_repeated = former is not None and (former.outcome, former.failed) == (outcome.outcome, outcome.failed)
        if kept_decision.is_shown and not is_repeated:
            self._publish(self._outcome_event(selection_id, kept_decision.worker, outcome))

    def find(self, name: str) -> tuple[KeptDecision, list[str]] | None:
        """Return the decision with this id of a selection or a request, and the earlier selections of that request.

        For a request's id, the decision is that of the last attempt. Returns None if there is none.
        """
        kept_decision = self._kept_decisions.get(name)
        if kept_decision is not None:
            return kept_decision, []
        attempts = self._of_request.get(name)
        return None if attempts is None else (self._kept_decisions[attempts[-1]], attempts[:-1])

    def last(self, most: int, wanted: DecisionFilter = EVERY) -> tuple[list[KeptDecision], int]:
        """Return up to `most` of the wanted decisions, the newest first, and how many were examined to find them."""
        found_decisions: list[KeptDecision] = []
        searched = 0
        for kept_decision in islice(reversed(self._kept_decisions.values()), MAX_SEARCHED):
            if len(found_decisions) == most:
                break
            searched += 1
            if wanted.wants(kept_decision):
                found_decisions.append(kept_decision)
        return found_decisions, searched
