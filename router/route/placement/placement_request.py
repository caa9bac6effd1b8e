# SPDX-License-Identifier: Apache-2.0
"""A request to be placed, and its placement: where it is decoded, and where its prompt is computed, if elsewhere."""

from __future__ import annotations

from typing import Protocol

import msgspec
from xxhash import xxh3_64_hexdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.choose import Choice

# Of max_tokens: the largest number that a trace can hold. What asks for more asks for no limit.
MAX_LIMIT_TOKENS = 2**63 - 1


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. question: a prompt whose tokens are not known has no block hashes and an estimated length;
    max_tokens: the most that is generated, up to MAX_LIMIT_TOKENS, None: not known; pinned: this worker and no other, as
    `Pin` or by its name (`w0`, `w0@1`); selection_id: the client's own; may_hand_over: whether another worker may compute
    the prompt for the one that decodes it; dry_run: it is not sent where it is placed, so later choices must not count on
    it; keeps_comparison: the placement's choice has the workers that were compared; key_name: of the API key that the
    request came with."""

    question: Question
    session_id: str | None = None
    max_tokens: int | None = None
    pinned: Pin | str | None = None
    selection_id: str | None = None
    may_hand_over: bool = True
    dry_run: bool = False
    keeps_comparison: bool = False
    key_name: str = ""

    @property
    def fair_key(self) -> str:
        """Return the name under which this prompt's part of the memory counts: of its API key, else of its cache salt,
        else none."""
        if self.key_name:
            return f"key {self.key_name}"
        salt = self.question.cache_salt
        # A salt may be as long as a body.
        return f"salt {xxh3_64_hexdigest(salt.encode('utf-8', 'surrogatepass'))}" if salt else ""


class PlacementOwner(Protocol):
    """Receives the progress of a placement."""

    def first_token(self, placement: Placement) -> None: ...

    def handed_over(self, placement: Placement) -> None: ...

    def prefill_failed(self, placement: Placement, ask: PlacementRequest | None) -> None: ...

    def served_by(self, placement: Placement, hit: Hit) -> None: ...

    def done(self, placement: Placement, output_tokens: int | None) -> None: ...

    def reused(self, placement: Placement, tokens: int) -> None: ...


class PrefillPart:
    """The worker that computes a placement's prompt, and its load there."""

    __slots__ = ("choice", "placed_s", "reservation_id", "url", "worker")

    def __init__(self, reservation_id: str, choice: Choice, placed_s: float) -> None:
        self.reservation_id = reservation_id
        self.choice = choice
        self.worker: WorkerKey = choice.hit.worker
        self.url = choice.url
        self.placed_s = placed_s


class Placement:
    """One request's place and its load there. Ends by `done`, or by its expiry.

    prefill: where the prompt is computed, as long as it is to be; prefilled_at: who did. predicted_tokens: what of the
    prompt nobody computes again, as predicted. decode_tokens: what it holds at the worker while it is decoded. has_moved:
    another worker than the chosen one serves it."""

    __slots__ = (
        "_ends",
        "choice",
        "decode_tokens",
        "has_moved",
        "names",
        "num_tokens",
        "placed_s",
        "predicted_tokens",
        "prefill",
        "prefilled_at",
        "prefilling",
        "queued_s",
        "selection_id",
        "told_s",
        "url",
        "worker",
    )

    def __init__(
        self,
        ends: PlacementOwner,
        selection_id: str,
        choice: Choice,
        names: list[int],
        num_tokens: int,
        decode_tokens: int,
        placed_s: float,
    ) -> None:
        self._ends = ends
        self.selection_id = selection_id
        self.worker = choice.hit.worker
        self.url = choice.url
        self.choice = choice
        self.names = names
        self.num_tokens = num_tokens
        self.decode_tokens = decode_tokens
        self.has_moved = False
        self.placed_s = placed_s
        self.queued_s = 0.0
        self.prefill: PrefillPart | None = None
        self.prefilled_at: WorkerKey | None = None
        self.predicted_tokens = choice.hit.disk
        self.prefilling = True
        # When its first token came.
        self.told_s: float | None = None

    def handed_over(self) -> None:
        """The prefill worker has computed the prompt: its load there ends, and the decode worker is next."""
        self._ends.handed_over(self)

    def prefill_failed(self, ask: PlacementRequest | None) -> None:
        """The prefill worker did not compute it. With `ask`, `prefill` becomes another one if there is one; otherwise
        the decode worker computes it alone."""
        self._ends.prefill_failed(self, ask)

    def first_token(self) -> None:
        """The prefill is over. Repeating it changes nothing."""
        self._ends.first_token(self)

    def served_by(self, hit: Hit) -> None:
        """Another worker than the chosen one answers: its load counts there from now on. hit: of that one."""
        self._ends.served_by(self, hit)

    @property
    def expected_tokens(self) -> int:
        """The reuse expected when the engine schedules the prompt; never below `predicted_tokens`."""
        if self.has_moved or self.prefilled_at is not None or self.choice.prefill is not None:
            return self.predicted_tokens
        return max(self.predicted_tokens, self.choice.expected_tokens)

    def reused(self, tokens: int) -> None:
        """Report what the engine says that it reused of the prompt."""
        self._ends.reused(self, tokens)

    def done(self, output_tokens: int | None = None) -> None:
        """The request is over, successful or not. Repeating it changes nothing."""
        self._ends.done(self, output_tokens)
