# SPDX-License-Identifier: Apache-2.0
"""The placements of this process that are under way: their load, and the speeds learned when they end.

Belongs to one asyncio loop; synchronous, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvrouter.contract.tiers import MEASURED
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.route.load.load_messages import PREFILL_COMPLETE
from kvrouter.router.route.load.load_metrics import LoadMetrics
from kvrouter.router.route.load.prefix_tree import PromptPrefixes
from kvrouter.router.route.load.traffic_sums import TrafficSums
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.decider import Decider
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest, PrefillPart

# The assumed length of an answer of unknown length; on average half of it is held while it is decoded.
USUAL_OUTPUT_TOKENS = 512
LIVE = StreamState.LIVE.value
# The suffix of a reservation's id for its load at the prefill worker; no client's id has a slash.
PREFILL_PART = "/prefill"


class Reservations:
    """The owner of the placements."""

    def __init__(
        self,
        weights: LoadModel,
        decider: Decider,
        *,
        metrics: LoadMetrics,
        traffic: TrafficSums,
        clock: Callable[[], float],
        changed: Callable[[], None],
        freed: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._table = weights.table
        self._decider = decider
        self._metrics = metrics
        self._traffic = traffic
        self._clock = clock
        # Called when load was added.
        self._changed = changed
        # Called when load went away.
        self._freed = freed
        self._placements: dict[str, Placement] = {}

    def book(
        self,
        selection_id: str,
        choice: Choice,
        prefixes: PromptPrefixes,
        num_tokens: int,
        max_tokens: int | None,
        now: float,
        num_prompts: int = 1,
        answers: int = 1,
    ) -> Placement:
        """Count the load of a choice from now on, and return its placement.

        Args:
            selection_id: The id of the placement.
            choice: The choice of the worker.
            prefixes: The prompts' prefixes.
            num_tokens: The length of all prompts.
            max_tokens: The most tokens of an answer, or None if that is not known.
            now: The current time.
            num_prompts: The number of prompts.
            answers: The number of answers to each prompt.
        """
        output_tokens = min(max_tokens if max_tokens is not None else USUAL_OUTPUT_TOKENS, USUAL_OUTPUT_TOKENS)
        # Each answer is decoded with its prompt as its context.
        decode_tokens = answers * (num_tokens + num_prompts * (output_tokens // 2))
        placement = Placement(
            self, selection_id, choice, prefixes, num_tokens, decode_tokens, now, num_prompts, answers
        )
        if (pull := choice.pull) is None:
            self._count(selection_id, choice, decode_tokens, now, placement.sequences)
        else:
            fetched_tokens = pull.fetched_tokens
            self._count(selection_id, choice, decode_tokens, now, placement.sequences, pull.source, fetched_tokens)
        self._placements[selection_id] = placement
        self._weights.typical(choice.prefill_tokens / num_prompts, num_tokens / num_prompts)
        if choice.prefill is not None:
            self._begin_prefill(placement, choice.prefill, now)
        self._changed()
        return placement

    def _count(
        self,
        reservation_id: str,
        choice: Choice,
        decode_tokens: int,
        now: float,
        sequences: int = 1,
        source: WorkerKey | None = None,
        lent_tokens: int = 0,
    ) -> None:
        """Reserve load at the chosen worker and at the source of its blocks, and forget the placements dropped for it."""
        worker, prefill_tokens = choice.hit.worker, choice.prefill_tokens
        dropped = self._table.reserve(
            reservation_id, worker, prefill_tokens, decode_tokens, now, sequences, source, lent_tokens
        )
        self._forget(dropped, "no_room")
        self._metrics.reservations.inc()

    def _begin_prefill(self, placement: Placement, prefill: Choice, now: float) -> None:
        """Count the prompt's load at the prefill worker."""
        part = placement.prefill = PrefillPart(placement.selection_id + PREFILL_PART, prefill.alone(), now)
        placement.predicted_tokens = prefill.hit.tokens
        # The prefill worker holds the prompt until it is fetched, and decodes nothing.
        self._count(part.reservation_id, prefill, 0, now)

    def handed_over(self, placement: Placement) -> None:
        """Move a placement from its prefill worker, which has computed the prompt, to the decode worker."""
        part = placement.prefill
        if part is None:
            return
        now = self._clock()
        placement.prefilled_at = part.worker
        self._decider.computed(part.worker, placement.prefixes, now)
        self._learn(part.choice, placement.num_tokens, now - part.placed_s)
        self._end_prefill(placement, now)
        # The request reaches the decode worker only now; its engine may have reported before that it is idle.
        self._table.renew(placement.selection_id, now)
        self._decider.mark_pending(placement.worker, placement.prefixes, now)
        self._freed()

    def prefill_failed(self, placement: Placement, request: PlacementRequest | None) -> None:
        """Choose another prefill worker, or have the decode worker compute the prompt.

        Args:
            placement: The placement whose prefill worker did not compute the prompt.
            request: The request, or None to choose no other prefill worker.
        """
        part = placement.prefill
        if part is None:
            return
        now = self._clock()
        self._decider.failed(part.worker, placement.prefixes, now)
        self._end_prefill(placement, now)
        prefill = None if request is None else self._decider.another_prefill(request, placement.choice, now)
        if prefill is not None:
            self._decider.mark_pending(prefill.hit.worker, placement.prefixes, now)
            self._begin_prefill(placement, prefill, now)
        else:
            placement.predicted_tokens = placement.choice.hit.tokens
            self._table.renew(placement.selection_id, now, prefill_tokens=placement.choice.alone_tokens)
            self._decider.mark_pending(placement.worker, placement.prefixes, now)
        self._freed()

    def _end_prefill(self, placement: Placement, now: float) -> None:
        """End the load at the prefill worker, if there is one."""
        part, placement.prefill = placement.prefill, None
        if part is not None and self._table.release(part.reservation_id, now):
            self._metrics.ended["released"].inc()

    def first_token(self, placement: Placement) -> None:
        """End a placement's prefill, and learn how long it took; repeating it changes nothing."""
        if not placement.prefilling:
            return
        placement.prefilling = False
        now = placement.first_token_s = self._clock()
        self._computed(placement)
        if (part := placement.prefill) is not None:
            # The client that sent both requests did not report the end of the prefill.
            placement.prefilled_at = part.worker
            self._decider.computed(part.worker, placement.prefixes, now)
            self._decider.mark_pending(placement.worker, placement.prefixes, now)
            self._end_prefill(placement, now)
        elif placement.prefilled_at is None and not placement.has_moved and placement.num_prompts == 1:
            self._learn(placement.choice, placement.num_tokens, now - placement.placed_s)
        self._table.prefill_done(placement.selection_id, now)
        self._decider.computed(placement.worker, placement.prefixes, now)
        self._freed()

    def served_by(self, placement: Placement, hit: Hit) -> None:
        """Move a placement's load to the worker that serves it in place of the chosen one."""
        if placement.selection_id not in self._placements or hit.worker == placement.worker:
            return
        now = self._clock()
        self._decider.failed(placement.worker, placement.prefixes, now)
        if self._table.release(placement.selection_id, now):
            self._metrics.ended["released"].inc()
        prefill_tokens = placement.choice.prefill_tokens
        if placement.prefilled_at is None:
            prefill_tokens = placement.num_tokens - hit.tokens
            placement.predicted_tokens = hit.tokens
        # The pull was planned for the chosen worker. This one got the same request, so it fetches from the same source.
        source = placement.pull.source if placement.pull is not None and placement.prefilling else None
        lent_tokens = sum([pull.tokens - hit.tokens for pull in hit.pulls if pull.source == source])
        placement.choice = msgspec.structs.replace(placement.choice, hit=hit, prefill_tokens=prefill_tokens, pull=None)
        placement.worker, placement.has_moved = hit.worker, True
        self._count(
            placement.selection_id,
            placement.choice,
            placement.decode_tokens,
            now,
            placement.sequences,
            source if lent_tokens else None,
            lent_tokens,
        )
        self._decider.mark_pending(hit.worker, placement.prefixes, now)
        self._freed()

    def done(self, placement: Placement, output_tokens: int | None) -> None:
        """End a placement; repeating it changes nothing.

        Args:
            placement: The placement.
            output_tokens: Length of the answer, or None if it is not known.
        """
        if self._placements.pop(placement.selection_id, None) is None:
            return
        now = self._clock()
        self._table.release(placement.selection_id, now)
        if placement.prefilling:
            if output_tokens is not None:
                # The answer came in one piece, so its first token was never reported.
                self._computed(placement)
            # The worker may never have begun to compute the prompt.
            placement.prefilling = False
            self._decider.failed(placement.worker, placement.prefixes, now)
            if placement.prefill is not None:
                self._decider.failed(placement.prefill.worker, placement.prefixes, now)
                self._end_prefill(placement, now)
        elif output_tokens is not None and placement.first_token_s is not None and placement.sequences == 1:
            self._weights.rates_of(placement.worker).decoded(output_tokens - 1, now - placement.first_token_s)
        self._metrics.ended["released"].inc()
        self._freed()

    def reused(self, placement: Placement, tokens: int) -> None:
        """Learn from the reuse that the engine reported, if the prompt was computed where it was placed."""
        if placement.has_moved or placement.prefilled_at is not None:
            return
        if placement.pull is None:
            self._decider.reused(placement.choice, tokens)
        else:
            first_s = placement.first_token_s
            seconds = None if first_s is None else first_s - placement.placed_s
            self._decider.fetched(placement.choice, placement.num_tokens, tokens, seconds, self._clock())

    def _computed(self, placement: Placement) -> None:
        """Count the prompt's length, or the mean length of several, at the worker that computed it."""
        mean_tokens = placement.num_tokens // placement.num_prompts
        self._weights.prompts.add(placement.prefilled_at or placement.worker, mean_tokens)

    def _learn(self, choice: Choice, num_tokens: int, seconds: float) -> None:
        """Learn how long a worker took for a prompt, from its request to its first token.

        Args:
            choice: The choice of the worker.
            num_tokens: Length of the prompt.
            seconds: The time that the worker took.
        """
        hit = choice.hit
        computed_tokens = num_tokens - hit.tokens
        # If similar prompts were being computed there, a tier behind the measured one was read, or blocks were fetched, the
        # time is not that of the prompt's own tokens.
        if choice.pull is not None:
            return
        if hit.state != LIVE or hit.approximate or hit.tokens > hit.by_tier[MEASURED]:
            return
        if choice.prefill_tokens >= computed_tokens:
            loaded_tokens = hit.by_tier[MEASURED] - hit.on_gpu
            speed = self._weights.rates_of(hit.worker)
            speed.first_token(computed_tokens, loaded_tokens, choice.queued_tokens, seconds)

    def end(self, selection_id: str, how: str) -> bool:
        """End a reservation or, for PREFILL_COMPLETE, its prefill; return False if this process has none of this id."""
        placement = self._placements.get(selection_id)
        if placement is None:
            return False
        if how == PREFILL_COMPLETE:
            self.first_token(placement)
        else:
            self.done(placement, None)
            if not placement.is_watched:
                self._count_end(placement)
        return True

    def _count_end(self, placement: Placement) -> None:
        """Count a request whose answer did not pass through this router, with its predicted reuse as the actual one."""
        self._traffic.of(placement.worker.model).requests += 1
        self._traffic.answered(
            placement.prefilled_at or placement.worker,
            placement.prefixes.names if placement.num_prompts == 1 else (),
            placement.num_tokens,
            placement.predicted_tokens,
        )

    def _forget(self, reservation_ids: Iterable[str], how: str) -> None:
        """Forget reservations that the table has dropped, and count why."""
        for reservation_id in reservation_ids:
            placement = self._placements.pop(reservation_id, None)
            if placement is not None:
                self._end_prefill(placement, self._clock())
            self._metrics.ended[how].inc()

    def expire(self, now: float) -> None:
        """End the reservations that are too old."""
        self._forget(self._table.expire(now), "expired")
