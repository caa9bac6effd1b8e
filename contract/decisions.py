# SPDX-License-Identifier: Apache-2.0
"""Why requests went where they went: the answers of `/decisions`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.contract import fields
from kvrouter.contract.choices import CandidateReply, PullReply, count_of_one
from kvrouter.contract.hits import Overlap


class Proof(StrEnum):
    """The evidence behind a predicted hit."""

    # The worker's events, with nothing in doubt, and the prompt's tokens.
    EXACT = "exact"
    # The last known residency of a worker in doubt, or only the beginning of a prompt, or only some prompts of a list.
    ASSUMED = "assumed"
    # The prompts that were sent there before.
    APPROXIMATE = "approximate"
    # Nothing: the prompt's tokens were not known.
    UNKNOWN = "unknown"


class Wanted(StrEnum):
    """The kinds of decisions to which a list can be limited."""

    # The engine reported a reuse that differs from the predicted one.
    WRONG = "wrong"
    # The chosen worker reuses less than another one would.
    LOST = "lost"
    # The request failed, as `failed` of its outcome says; each request counts once, with its last attempt.
    FAILED = "failed"


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a request. Times are seconds since the arrival of the whole request."""

    outcome: Annotated[
        str, Meta(description="as kvrouter_proxy_requests_total names it, or the kind of failure of an attempt")
    ]
    predicted_tokens: Annotated[
        int | None,
        Meta(
            description="tokens that were predicted to be reused; null: reuse cannot be predicted, or the prediction cannot be "
            "compared with the engine's report. For a list, the prompts that this report is about: with vLLM, the last one"
        ),
    ]
    delivered_tokens: Annotated[
        int | None,
        Meta(
            description="tokens that the engine reported as reused, without fetched_tokens; null: it did not report them"
        ),
    ]
    prompt_tokens: Annotated[
        int | None, Meta(description="tokens of the prompt, or of all prompts of a list, as the engine reports them")
    ]
    completion_tokens: Annotated[int | None, Meta(description="tokens that were generated")]
    ttft_s: Annotated[float | None, Meta(description="seconds from the whole request to the first token of a stream")]
    e2e_s: Annotated[float, Meta(description="seconds from the whole request to the end of its answer")]
    expected_tokens: Annotated[
        int | None, Meta(description="tokens expected to be reused after the prompts ahead; null: not predicted")
    ] = None
    status: Annotated[int | None, Meta(description="HTTP status of the answer; null: there was none")] = None
    failed: Annotated[
        bool,
        Meta(
            description="whether the request failed, as GET /history counts it: a status of 500 or more, or an answer that "
            "broke off; not clients that hung up, and not an attempt after which another worker got the request"
        ),
    ] = False
    fetched_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="tokens that the engine reported as reused beyond its own tiers, because it fetched them from the "
            "source that the request named; absent: it named none, or they are not known"
        ),
    ] = UNSET


class DecidedPrefill(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worker that was to compute the prompt and hand it over."""

    worker_id: fields.WorkerId
    dp_rank: fields.DpRank
    endpoint: fields.Endpoint
    overlap: Annotated[Overlap, Meta(description="what the worker would reuse of the prompt")]
    reason: Annotated[str, Meta(description="why it was chosen, as a sentence")]
    candidates: Annotated[
        tuple[CandidateReply, ...] | None, Meta(description="the workers compared; absent in lists")
    ] = None


class DecisionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The explanation of one choice, with the state and the load of that moment."""

    selection_id: Annotated[str, Meta(description="names the choice")]
    request_id: Annotated[str, Meta(description="the request's x-request-id; empty for a choice without a request")]
    time_s: Annotated[float, Meta(description="seconds since 1970")]
    model: fields.Model
    worker_id: fields.WorkerId
    dp_rank: fields.DpRank
    endpoint: fields.Endpoint
    num_tokens: Annotated[int, Meta(description="length of the prompt in tokens; for a list, of all its prompts")]
    # With `default=1` they would be left out of the usual reply.
    num_prompts: Annotated[
        int,
        Meta(description="number of prompts in the request, which go to one worker; overlap is the sum of their hits"),
    ] = msgspec.field(default_factory=count_of_one)
    answers: Annotated[int, Meta(description="number of answers to each prompt (`n`)")] = msgspec.field(
        default_factory=count_of_one
    )
    overlap: Annotated[Overlap, Meta(description="what the worker would reuse of the prompt")]
    expected_tokens: Annotated[
        int, Meta(description="tokens expected to be reused after the prompts ahead; at least the hit")
    ]
    effective_prefill_tokens: Annotated[int, Meta(description="tokens of the prompt that are to be computed")]
    queued_tokens: Annotated[int, Meta(description="tokens to be computed before it at the worker")]
    proof: Annotated[
        Proof,
        Meta(
            description="what the predicted hit rests on: exact (events without a doubt, and all tokens of the prompt), "
            "assumed (a worker in doubt, the beginning of a prompt, or some prompts of a list), approximate (the prompts "
            "that were sent there before), unknown (no tokens)"
        ),
    ]
    reason: Annotated[str, Meta(description="why it was chosen, as a sentence")]
    lost_by: Annotated[
        str,
        Meta(
            description="why the chosen worker reuses less than best_hit_tokens (docs/explanation/choosing.md); empty "
            "where it does not"
        ),
    ]
    best_hit_tokens: Annotated[int, Meta(description="the longest hit of all workers compared")]
    compared: Annotated[
        int, Meta(description="workers compared; candidates has the chosen one and up to 63 of the cheapest others")
    ]
    session_id: Annotated[str | None, Meta(description="the session")]
    max_tokens: Annotated[int | None, Meta(description="expected length of the answer in tokens")]
    pinned_worker: Annotated[str | None, Meta(description="the only worker allowed; null: any")]
    outcome: Annotated[
        Outcome | None,
        Meta(description="how the request ended; null while it runs, and for a choice without one"),
    ]
    candidates: Annotated[
        tuple[CandidateReply, ...] | None, Meta(description="the workers compared; absent in lists")
    ] = None
    prefill: Annotated[
        DecidedPrefill | None, Meta(description="the worker that was to compute the prompt first, if another was")
    ] = None
    pull: Annotated[
        PullReply | None, Meta(description="the blocks that it was to fetch from another worker; absent: none")
    ] = None
    earlier: Annotated[
        list[str] | None, Meta(description="selections of the request's attempts before, which failed")
    ] = None


class DecisionsReply(msgspec.Struct, frozen=True):
    """The last decisions of all processes of this router, without their candidates."""

    decisions: Annotated[list[DecisionReply], Meta(description="the newest first")]
    kept: Annotated[int, Meta(description="decisions that are kept")] = 0
    searched: Annotated[
        int, Meta(description="how many of them were searched, the newest first; at most 10,000 of each process")
    ] = 0
