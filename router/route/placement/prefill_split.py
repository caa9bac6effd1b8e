# SPDX-License-Identifier: Apache-2.0
"""The decision whether the decoding worker computes a prompt, or a prefill worker that hands it over. Pure.

The cost function has already chosen the worker that decodes, among those that do. A prefill worker computes the prompt
only where that is over sooner, including the hand-over, and where enough tokens are to be computed at all.

Invariant: a worker whose role is prefill never gets a prompt to decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random

import msgspec

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.choose import Choice, choose, without_pull
from kvrouter.router.route.placement.cost import ChoiceContext, weigh

# The fixed cost of a hand-over besides the transfer, in tokens that could be computed meanwhile: a second request over
# HTTP, which is read and tokenized once more, a step of each engine, and the first contact of their connectors. It
# takes some 30 ms, at 30,000 tokens a second.
HANDOVER_TOKENS = 1_000

# A prompt is computed between the steps of requests that run at the decode worker. A second for which one of them
# stands still costs as much as a second for which the prompt waits. At most this many requests count: a prompt must not
# wait for many times its own length to spare others.
DISTURBED_MAX = 4


class PrefillOutcome(StrEnum):
    """The outcome of the decision, as the metrics name it."""

    REMOTE = "remote"
    SHORT = "short"  # fewer uncached tokens at the decode worker than `SplitRules.min_tokens`
    CHEAPER_HERE = "cheaper_here"
    SATURATED = "saturated"  # every prefill worker has too much to do
    UNAVAILABLE = "unavailable"  # none takes anything: down, draining, its breaker open
    EXCLUDED = "excluded"  # the client left them all out
    REQUEST = "request"  # such a request cannot be handed over, or is pinned


class SplitRules(msgspec.Struct, frozen=True):
    """The settings of hand-overs."""

    # Uncached tokens at the decode worker below which no prompt is handed over.
    min_tokens: int
    # The cost of a transferred token, in computed tokens.
    token_cost: float

    def handover_tokens(self, tokens: int) -> float:
        """Return the cost of handing over this many tokens, in computed tokens."""
        return HANDOVER_TOKENS + self.token_cost * tokens


def with_prefill(
    choice: Choice,
    prefillers: Sequence[Hit],
    context: ChoiceContext,
    rules: SplitRules,
    rng: Random,
    *,
    arriving: Mapping[WorkerKey, int],
) -> tuple[Choice, PrefillOutcome]:
    """Add a prefill worker to a choice where that is worth it, and return the choice and the outcome.

    Args:
        choice: The choice of the worker that decodes.
        prefillers: Hits of the prefill workers that take requests now; at least one.
        context: The context of the choice, with only those pending prefixes that are computed where they are pending.
        rules: The settings of hand-overs.
        rng: Decides between equals.
        arriving: Tokens of the prompt that are on their way to each worker by a hand-over. They need not be computed or
            sent twice, but are not there yet.
    """
    hit, num_tokens = choice.hit, context.num_tokens
    costs_here = weigh((hit,), context, hit.tokens)
    alone_tokens = costs_here.computed_tokens(0)
    choice = msgspec.structs.replace(choice, prefill_tokens=alone_tokens)
    if alone_tokens < rules.min_tokens:
        return choice, PrefillOutcome.SHORT
    # The session counts for the worker that decodes, so it is left out here.
    prefill = choose(prefillers, msgspec.structs.replace(context, session=None, lenders=None), rng)
    if prefill.all_saturated:
        return choice, PrefillOutcome.SATURATED
    sent_tokens = num_tokens - max(hit.on_gpu, arriving.get(hit.worker, 0))
    handover_tokens = rules.handover_tokens(sent_tokens)
    here_parts = costs_here.candidate(0, hit, 0).parts
    there_parts = weigh((prefill.hit,), context, prefill.hit.tokens).candidate(0, prefill.hit, 0).parts
    cost_there = there_parts.prefill + there_parts.load + handover_tokens
    running = min(context.weights.burden(hit.worker).requests, DISTURBED_MAX)
    cost_here = here_parts.prefill * (1 + running) + here_parts.load
    if cost_there >= cost_here:
        return choice, PrefillOutcome.CHEAPER_HERE
    if choice.pull is not None:
        # The decode worker receives its blocks from the prefill worker, and a request names one source.
        choice = without_pull(choice, context)
        alone_tokens = weigh((hit,), msgspec.structs.replace(context, lenders=None), hit.tokens).computed_tokens(0)
    text = (
        f"{choice.reason}; computed at {printable(prefill.hit.worker.route_name)} and handed over: a cost of {cost_there:.0f} "
        f"tokens in place of {cost_here:.0f}"
    )
    return (
        msgspec.structs.replace(
            choice,
            reason=text,
            prefill=prefill,
            # The work that is left for the decode worker before its first token.
            prefill_tokens=round(rules.token_cost * sent_tokens),
            alone_tokens=alone_tokens,
        ),
        PrefillOutcome.REMOTE,
    )
