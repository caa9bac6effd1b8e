# SPDX-License-Identifier: Apache-2.0
"""The traffic of another router as it is seen: requests, their outcomes, and why some cannot be judged. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Skip(StrEnum):
    """A reason why a request is not judged. The values are those of the report."""

    BROKEN = "broken"
    NO_PROMPT = "no_prompt"
    SEVERAL_PROMPTS = "several_prompts"
    NO_TIME = "no_time"
    TOO_LATE = "too_late"
    TOO_LARGE = "too_large"
    OVERFLOW = "overflow"
    UNKNOWN_MODEL = "unknown_model"
    NO_WORKER = "no_worker"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    TOKENS_UNKNOWN = "tokens_unknown"
    LENGTH = "length"
    UNKNOWN_WORKER = "unknown_worker"
    UNNAMED_WORKER = "unnamed_worker"
    NO_CREDIT = "no_credit"
    UNMATCHED = "unmatched"
    UNFINISHED = "unfinished"


SKIP_TEXTS = {
    Skip.BROKEN: "not JSON, or fields that do not fit",
    Skip.NO_PROMPT: "without messages or prompt",
    Skip.SEVERAL_PROMPTS: "with several prompts in one body",
    Skip.NO_TIME: "without a time, in a file that does not grow; use --follow, or replay it with `kvrouter replay`",
    Skip.TOO_LATE: "older than --max-age when read, so the index has moved on; old logs are for `kvrouter replay`",
    Skip.TOO_LARGE: "larger than 32 MiB",
    Skip.OVERFLOW: "came faster than the router answered",
    Skip.UNKNOWN_MODEL: "of a model that the router does not have",
    Skip.NO_WORKER: "while no worker could take a request",
    Skip.REFUSED: "refused by the router",
    Skip.UNREACHABLE: "while the router did not answer",
    Skip.TOKENS_UNKNOWN: "whose tokens the router does not know",
    Skip.LENGTH: "of which engine and router count other tokens",
    Skip.UNKNOWN_WORKER: "sent to an address or id that the router does not have as a worker",
    Skip.UNNAMED_WORKER: "with cached tokens, but without the worker",
    Skip.NO_CREDIT: "sent to a worker of which the router cannot prove what it holds",
    Skip.UNMATCHED: "in the log, but no mirrored request with that id was judged",
    Skip.UNFINISHED: "still unjudged at the end",
}


class Unjudged(Exception):
    """A request that cannot be judged. `detail` says for people what showed it; empty if the reason says it all."""

    def __init__(self, reason: Skip, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Outcome(msgspec.Struct, frozen=True):
    """The known facts about a request that another router has placed. None stands for an unknown fact."""

    # As the other router names it.
    worker: str | None = None
    # The tokens that the engine reported as reused.
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


class Observation(msgspec.Struct, frozen=True):
    """A request that another router placed, and the query to this router's index about it."""

    # The body of the `/select` that queries the index.
    question: bytes
    outcome: Outcome
    # When the request was read, by the clock of the run, less the age that it had then.
    seen_s: float
    request_id: str | None = None

    @property
    def is_served(self) -> bool:
        """Whether the engine has served the request, so that the index may hold the request itself."""
        return self.outcome.cached_tokens is not None
