# SPDX-License-Identifier: Apache-2.0
"""The choice of a worker: the body and the answer of `/select` and `/select_and_reserve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvrouter.contract import fields
from kvrouter.contract.hits import HitLimit, Overlap, PeerHit
from kvrouter.contract.queries import PromptBody

# A client's own name for its reservation. It becomes a part of paths.
SelectionId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^/?#]+$")]


class PinnedBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The only worker that may be chosen."""

    worker_id: Annotated[str | int, Meta(description="the worker's id")]
    dp_rank: Annotated[int | None, Meta(description="only this data-parallel rank; any of them if absent")] = None


class SessionBody(msgspec.Struct, kw_only=True):
    """The session in the form of Dynamo's clients. Their other fields are ignored."""

    session_id: Annotated[str, Meta(description="the session")]


class SelectBody(PromptBody, kw_only=True):
    """A prompt to place: exactly one of token_ids, block_hashes, prompt and messages.

    Fields beside prompt and messages (tools, chat_template_kwargs, ...) count as in OpenAI's API.
    """

    token_ids: Annotated[fields.TokenIds | None, Meta(description="the prompt as token ids")] = None
    block_hashes: Annotated[fields.BlockHashes | None, Meta(description="the prompt as block hashes")] = None
    num_tokens: Annotated[
        fields.NumTokens | None,
        Meta(description="length of a prompt given by hashes, in tokens; by default one more than the hashes cover"),
    ] = None
    prompt: Annotated[
        str | Sequence[Any] | None,
        Meta(
            description="a prompt, as in OpenAI's completions: a text, token ids, or a list of either, whose prompts are "
            "placed together"
        ),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="number of answers to each prompt, for the load; 1 if absent"),
    ] = None
    messages: Annotated[Sequence[dict[str, Any]] | None, Meta(description="a chat, as in OpenAI's API")] = None
    session_id: Annotated[
        str | None, Meta(description="the session; its last worker is preferred among nearly equal ones")
    ] = None
    max_tokens: Annotated[
        fields.NonNegative | None, Meta(description="expected length of the answer in tokens, for the load")
    ] = None
    exclude_workers: Annotated[Sequence[str | int] | None, Meta(description="not these workers")] = None
    dp_rank: Annotated[fields.NonNegative | None, Meta(description="only this data-parallel rank")] = None
    selection_id: Annotated[
        SelectionId | None, Meta(description="the client's own id of the choice; generated if absent")
    ] = None
    allowed_worker_ids: Annotated[
        Sequence[str | int] | None, Meta(description="only these workers, as Dynamo's clients name them")
    ] = None
    isl_tokens: Annotated[
        fields.NumTokens | None, Meta(description="the same as num_tokens, as Dynamo's clients name it")
    ] = None
    expected_output_tokens: Annotated[
        fields.NonNegative | None, Meta(description="the same as max_tokens, as Dynamo's clients name it")
    ] = None
    session_context: Annotated[SessionBody | None, Meta(description="the session, as Dynamo's clients name it")] = None
    pinned_worker: Annotated[PinnedBody | None, Meta(description="this worker only")] = None
    dry_run: Annotated[
        bool,
        Meta(
            description="for /select: whether the prompt is not sent there; later choices do not count on it, it cannot "
            "be claimed, and neither /decisions nor the metrics of prompts and choices show it"
        ),
    ] = False


class CostTerms(msgspec.Struct, frozen=True):
    """The terms of one worker's cost in tokens, each as it enters the sum (docs/explanation/choosing.md)."""

    prefill: Annotated[
        int,
        Meta(
            description="tokens of the prompt that are to be computed, with the price of those that are loaded or fetched "
            "from another worker"
        ),
    ]
    queued: Annotated[int, Meta(description="prefill tokens that are queued there")]
    decode: Annotated[int, Meta(description="tokens of answers that are generated there")]
    delay: Annotated[
        int,
        Meta(description="what computing it there costs later prompts, which wait, or compute again what it evicts"),
    ]
    room: Annotated[int, Meta(description="what the prompt's blocks push out of the worker's cache")]
    copy: Annotated[
        int, Meta(description="subtracted: what a copy of a beginning that others share saves the next prompts")
    ]
    junction: Annotated[
        int,
        Meta(description="subtracted: most of the tokens by which full attention reaches further than the longest hit"),
    ]
    session: Annotated[int, Meta(description="subtracted: the preference for the worker of the session")]

    @property
    def load(self) -> int:
        """The work of other requests that counts in the cost."""
        return self.queued + self.decode


class CandidateReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker as the choice compared it. The lowest cost wins."""

    worker_id: fields.WorkerName
    dp_rank: fields.DpRank
    overlap: Annotated[Overlap, Meta(description="what the worker would reuse of the prompt")]
    load: Annotated[int, Meta(description="the part of the cost that is other prompts' work, in tokens")]
    cost: Annotated[int, Meta(description="tokens: the sum of the parts, less those that are subtracted")]
    parts: Annotated[CostTerms, Meta(description="the terms of the cost")]
    saturated: Annotated[bool, Meta(description="whether it takes no more prompts")]
    state: fields.State
    limited_by: Annotated[HitLimit | None, Meta(description="the group that kept the hit from being longer")]
    pending: Annotated[
        int | None, Meta(description="tokens of this prompt that are being computed there; absent: none")
    ] = None
    reason: Annotated[str | None, Meta(description="why credit is withheld or reduced; absent if it is not")] = None
    approximate: Annotated[
        bool | None, Meta(description="true: an estimate from what was sent there, as the worker has no usable events")
    ] = None
    peer: Annotated[
        PeerHit | None, Meta(description="what it would reuse with the best source to fetch blocks from; absent: none")
    ] = None


class TokensReply(msgspec.Struct, frozen=True):
    """The source of a text's tokens, and how many of them are known."""

    source: Annotated[str, Meta(description="given, render, tokenize, local or none")]
    num_tokens: Annotated[int, Meta(description="length of the prompt in tokens")]
    known_tokens: Annotated[int, Meta(description="tokens whose ids are known")]
    problem: Annotated[str, Meta(description="why not all tokens are known; empty if they are")]


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worker that is to compute the prompt first, and how the prompt is handed over to the chosen one."""

    worker_id: fields.WorkerName
    dp_rank: fields.DpRank
    request_rank: fields.RequestRank = None
    endpoint: fields.Endpoint
    overlap: Annotated[Overlap, Meta(description="what the worker would reuse of the prompt")]
    effective_prefill_tokens: Annotated[int, Meta(description="tokens of the prompt that it must compute")]
    handover: Annotated[
        str, Meta(description="how the chosen worker is handed the prompt: kv_transfer_params or header")
    ]
    reason: Annotated[str, Meta(description="why it was chosen, as a sentence")]
    candidates: Annotated[
        tuple[CandidateReply, ...] | None, Meta(description="with explain: every worker that was compared")
    ] = None


class PullReply(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that the chosen worker is to fetch from another worker before it computes the prompt."""

    worker_id: Annotated[str | int, Meta(description="the source: the worker that lends the blocks")]
    dp_rank: fields.DpRank
    tokens: Annotated[
        int, Meta(description="tokens that the chosen worker reuses if all blocks arrive, its own tiers included")
    ]
    fetched_tokens: Annotated[
        int, Meta(description="tokens among them that are fetched; effective_prefill_tokens counts them as computed")
    ]
    timeout_s: Annotated[
        float,
        Meta(description="seconds within which the blocks must arrive; after that the engine computes the tokens"),
    ]


def count_of_one() -> int:
    """Return 1, the value of a field that answers of older routers lack."""
    return 1


class SelectReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The chosen worker."""

    selection_id: Annotated[str, Meta(description="names the choice, for reservations")]
    model: fields.Model
    worker_id: fields.WorkerName
    dp_rank: fields.DpRank
    request_rank: fields.RequestRank = None
    endpoint: fields.Endpoint
    overlap: Annotated[Overlap, Meta(description="what the worker would reuse of the prompt now")]
    # An older router's answer lacks it; with `default=0` it would be left out where it is 0.
    expected_tokens: Annotated[
        int,
        Meta(
            description="tokens that it will reuse once it schedules the prompt, with what the prompts ahead leave: an "
            "expectation, at least longest_matched (docs/explanation/quality.md)"
        ),
    ] = msgspec.field(default_factory=int)
    effective_prefill_tokens: Annotated[int, Meta(description="tokens of the prompt that it must compute")]
    reason: Annotated[str, Meta(description="why it was chosen, as a sentence")]
    tokens: Annotated[TokensReply | None, Meta(description="for texts: where their tokens come from")] = None
    cache_salt: Annotated[
        str | None,
        Meta(
            description="where the router makes salts: the `cache_salt` that the request to the engine must have, in place of "
            "the client's own"
        ),
    ] = None
    model_name: Annotated[str, Meta(description="the same as model; Dynamo's clients read it")]
    routing_group: fields.RoutingGroup
    isl_tokens: Annotated[int, Meta(description="length of the prompt in tokens; for a list, of all its prompts")]
    num_prompts: Annotated[
        int, Meta(description="number of prompts in the body, which go to one worker; overlap is the sum of their hits")
    ] = msgspec.field(default_factory=count_of_one)
    block_size: Annotated[int, Meta(description="tokens in a block")]
    potential_decode_blocks: Annotated[
        int, Meta(description="blocks of context that are decoded there, with this prompt")
    ]
    reserved: Annotated[bool, Meta(description="whether the prompt's load counts")]
    candidates: Annotated[
        tuple[CandidateReply, ...] | None, Meta(description="with explain: every worker that was compared")
    ] = None
    prefill: Annotated[
        PrefillReply | None, Meta(description="the worker that is to compute the prompt first, if another is")
    ] = None
    pull: Annotated[
        PullReply | None, Meta(description="the blocks that it is to fetch from another worker; absent: none")
    ] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        Meta(
            description="with pull: the object to copy into the field `kv_transfer_params` of the request to the engine, which "
            "names the source (`remote_kv_source`)"
        ),
    ] = None
