# SPDX-License-Identifier: Apache-2.0
"""What is seen of another router's traffic: requests, what came of them, and why some cannot be judged. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Skip(StrEnum):
    """Why a request is not judged. The values are those of the report."""

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
    """A request that cannot be judged. detail: what shows it, for people; empty where the reason says all."""

    def __init__(self, reason: Skip, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Outcome(msgspec.Struct, frozen=True):
    """What is known of a request that another router has placed. worker: as it names it; cached_tokens, prompt_tokens:
    by the engine. None: not known."""

    worker: str | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


class Observation(msgspec.Struct, frozen=True):
    """One request. question: the body of the `/select` that asks the index. seen_s: when it was read, by the clock of
    the run, less the age that it had then."""

    question: bytes
    outcome: Outcome
    seen_s: float
    request_id: str | None = None

    @property
    def is_served(self) -> bool:
        """Whether the engine is done with it, so that the index may hold the request itself."""
        return self.outcome.cached_tokens is not None
