# SPDX-License-Identifier: Apache-2.0
"""A request to be placed, and its placement: the worker that decodes it, and the one that computes its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.route.load.prefix_tree import PromptPrefixes
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.planned_pull import PlannedPull

# The largest max_tokens, which a trace can still hold. A request with a larger value has no limit.
MAX_LIMIT_TOKENS = 2**63 - 1
# The most answers to one prompt that vLLM generates; it refuses a larger `n`. Source: vLLM 0.33.0
# (VLLM_MAX_N_SEQUENCES).
MAX_ANSWERS = 16_384


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be placed."""

    # The prompt. If its tokens are unknown, it has no block hashes and an estimated length.
    question: Question
    session_id: str | None = None
    # The most tokens to generate, up to MAX_LIMIT_TOKENS; None if that is not known.
    max_tokens: int | None = None
    # The only worker allowed, as `Pin` or by its name (`w0`, `w0@1`).
    pinned: Pin | str | None = None
    # The client's own id for the placement.
    selection_id: str | None = None
    # Whether another worker may compute the prompt for the one that decodes it.
    may_hand_over: bool = True
    # Whether the request can name a source, from which the engine fetches the prompt's blocks.
    may_pull: bool = True
    # Whether only engines with this project's tier read the source: vLLM reads sources at the request's path since a later
    # version than the first one with a p2p tier, and that tier declares no version.
    pulls_declared: bool = False
    # Whether the request will not be sent where it is placed, so that later choices must not count on it.
    dry_run: bool = False
    # Whether the placement's choice keeps the workers that were compared.
    keeps_comparison: bool = False
    # Name of the API key that the request came with.
    key_name: str = ""
    # The number of answers to each prompt, as with OpenAI's `n`. The engine runs each as a sequence of its own.
    answers: int = 1
    # Whether the engine's report of reused tokens is about the prompt that was placed. With several answers, it is
    # about one of them, which may reuse what another one has just computed.
    is_comparable: bool = True
    # Whether no other worker than the pinned one can answer, so that its load and its state do not matter.
    is_owned: bool = False
    # The tokens of the conversation before this prompt, which the pinned worker holds; 0 if there are none or they are not
    # known.
    conversation_tokens: int = 0
    # The id of the client's request, by which its decisions are found; empty if it has none.
    request_id: str = ""

    @property
    def sequences(self) -> int:
        """The number of sequences that the engine runs for this request."""
        return self.question.num_prompts * self.answers

    @property
    def session_name(self) -> str | None:
        """The name of the session. It differs for each cache salt, because prompts reuse nothing under another salt."""
        salt = self.question.cache_salt
        if not salt or not self.session_id:
            return self.session_id
        return f"{self.session_id}\0{xxh3_128_hexdigest(salt.encode('utf-8', 'surrogatepass'))}"

    @property
    def fair_key(self) -> str:
        """The name under which this prompt's part of the memory is counted.

        It is derived from the API key, or else from the cache salt; empty without both.
        """
        if self.key_name:
            return f"key {self.key_name}"
        salt = self.question.cache_salt
        # A salt may be as long as a body, so its hash is used.
        return f"salt {xxh3_64_hexdigest(salt.encode('utf-8', 'surrogatepass'))}" if salt else ""


class PlacementOwner(Protocol):
    """The receiver of a placement's progress; the methods correspond to those of `Placement`."""

    def first_token(self, placement: Placement) -> None:
        """Note the first token of the answer."""
        ...

    def handed_over(self, placement: Placement) -> None:
        """Note that the prefill worker has computed the prompt."""
        ...

    def prefill_failed(self, placement: Placement, request: PlacementRequest | None) -> None:
        """Note that the prefill worker did not compute the prompt, and choose another one for `request`, if given."""
        ...

    def served_by(self, placement: Placement, hit: Hit) -> None:
        """Note that another worker than the chosen one serves the request."""
        ...

    def done(self, placement: Placement, output_tokens: int | None) -> None:
        """Note the end of the request; output_tokens is None if the answer's length is not known."""
        ...

    def reused(self, placement: Placement, tokens: int) -> None:
        """Note how many tokens of the prompt the engine reused."""
        ...


class PrefillPart:
    """The worker that computes a placement's prompt for another one, and the load there."""

    __slots__ = ("choice", "placed_s", "reservation_id", "url", "worker")

    def __init__(self, reservation_id: str, choice: Choice, placed_s: float) -> None:
        self.reservation_id = reservation_id
        self.choice = choice
        self.worker: WorkerKey = choice.hit.worker
        self.url = choice.url
        self.placed_s = placed_s


class Placement:
    """The place of one request and its load there. It ends by `done` or by its expiry."""

    __slots__ = (
        "_ends",
        "answers",
        "choice",
        "decode_tokens",
        "first_token_s",
        "has_moved",
        "is_watched",
        "num_prompts",
        "num_tokens",
        "placed_s",
        "predicted_tokens",
        "prefill",
        "prefilled_at",
        "prefilling",
        "prefixes",
        "queued_s",
        "selection_id",
        "unrecorded",
        "url",
        "worker",
    )

    def __init__(
        self,
        ends: PlacementOwner,
        selection_id: str,
        choice: Choice,
        prefixes: PromptPrefixes,
        num_tokens: int,
        decode_tokens: int,
        placed_s: float,
        num_prompts: int = 1,
        answers: int = 1,
    ) -> None:
        self._ends = ends
        self.selection_id = selection_id
        # The worker that serves the request.
        self.worker = choice.hit.worker
        # URL of the worker that was chosen.
        self.url = choice.url
        self.choice = choice
        self.prefixes = prefixes
        # The length of all prompts, and their number.
        self.num_tokens = num_tokens
        self.num_prompts = num_prompts
        # The number of answers to each of them.
        self.answers = answers
        # Tokens that it holds at the worker while it is decoded.
        self.decode_tokens = decode_tokens
        # Whether another worker than the chosen one serves it.
        self.has_moved = False
        # Whether the answer passes through this router.
        self.is_watched = False
        self.placed_s = placed_s
        # Seconds that it waited for room before it was placed.
        self.queued_s = 0.0
        # The worker that is computing the prompt for this one, None if there is none or it is done.
        self.prefill: PrefillPart | None = None
        # The prefill worker that has computed the prompt.
        self.prefilled_at: WorkerKey | None = None
        # Tokens of the prompt that no worker computes again, as predicted.
        self.predicted_tokens = choice.hit.tokens
        # Whether the first token is still to come.
        self.prefilling = True
        # When the first token came.
        self.first_token_s: float | None = None
        # Records the placement for later choices, and in the log of decisions; None once it is done.
        self.unrecorded: Callable[[], None] | None = None

    def record(self) -> None:
        """Record the placement, for which its request need not wait; repeating it changes nothing.

        Call it before anything else of the loop runs: later choices must know of this one.
        """
        record, self.unrecorded = self.unrecorded, None
        if record is not None:
            record()

    def handed_over(self) -> None:
        """End the load at the prefill worker, which has computed the prompt; the decode worker is next."""
        self._ends.handed_over(self)

    def prefill_failed(self, request: PlacementRequest | None) -> None:
        """Report that the prefill worker did not compute the prompt.

        Args:
            request: The request, for which another prefill worker is chosen if one is worth it. With None, or without such
                a worker, the decode worker computes the prompt itself.
        """
        self._ends.prefill_failed(self, request)

    def first_token(self) -> None:
        """Report the first token, which ends the prefill; repeating it changes nothing.

        The first token of a list is that of one prompt, while others still wait, so it ends nothing.
        """
        if self.num_prompts == 1:
            self._ends.first_token(self)

    def served_by(self, hit: Hit) -> None:
        """Count the load at another worker than the chosen one from now on, because that one serves the request.

        Args:
            hit: The hit of the worker that serves it.
        """
        self._ends.served_by(self, hit)

    @property
    def sequences(self) -> int:
        """The number of sequences that the engine runs for this request."""
        return self.num_prompts * self.answers

    @property
    def pull(self) -> PlannedPull | None:
        """The blocks that the worker is to fetch; None without any, or after the request moved to another worker."""
        return self.choice.pull

    @property
    def expected_tokens(self) -> int:
        """The reuse expected when the engine schedules the prompt; never below `predicted_tokens`."""
        if self.has_moved or self.prefilled_at is not None or self.choice.prefill is not None:
            return self.predicted_tokens
        return max(self.predicted_tokens, self.choice.expected_tokens)

    def reused(self, tokens: int) -> None:
        """Report how many tokens of the prompt the engine says it reused."""
        self._ends.reused(self, tokens)

    def done(self, output_tokens: int | None = None) -> None:
        """End the request, successful or not; repeating it changes nothing."""
        self.record()
        self._ends.done(self, output_tokens)
