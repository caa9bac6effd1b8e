# SPDX-License-Identifier: Apache-2.0
"""Whether a prompt is computed by the worker that decodes it, or by a prefill worker that hands it over. Pure.

The worker that decodes is chosen before, by the one cost function, among those that decode. What is decided here is
what of its work another one does: only where that is over sooner, the hand-over included, and where enough is to be
computed at all. Invariant: a worker whose role is prefill is never given a prompt to decode, only to compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random

import msgspec

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.choose import Choice, choose
from kvrouter.router.route.placement.cost import ChoiceContext, weigh

# What a hand-over takes besides the transfer, in tokens that could be computed meanwhile: a second request over HTTP,
# read and tokenized once more, a step of each engine, the first contact of their connectors. Some 30 ms, at 30,000
# tokens a second.
HANDOVER_TOKENS = 1_000

# A second for which a request that runs at the decode worker stands still, as a prompt is computed between its steps,
# counts like one for which the prompt waits. Limited to this many: a prompt must not wait for many times its own
# length to spare others.
DISTURBED_MAX = 4


class PrefillOutcome(StrEnum):
    """What was decided, as the metrics name it."""

    REMOTE = "remote"
    SHORT = "short"  # fewer uncached tokens than the setting
    CHEAPER_HERE = "cheaper_here"
    SATURATED = "saturated"  # every prefill worker has too much to do
    UNAVAILABLE = "unavailable"  # none takes anything: down, draining, its breaker open
    EXCLUDED = "excluded"  # the client left them all out
    REQUEST = "request"  # such a request cannot be handed over, or is pinned


class SplitRules(msgspec.Struct, frozen=True):
    """min_tokens: uncached tokens at the decode worker below which nothing is handed over. token_cost: of a token that
    is transferred, in tokens computed."""

    min_tokens: int
    token_cost: float

    def handover_tokens(self, tokens: int) -> float:
        """The cost of handing over this many tokens, in computed tokens."""
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
    """`choice` of the worker that decodes, with the one that computes the prompt for it where that is worth it.

    prefillers: the hits of the prefill workers that take something now; there must be one. context: of the choice, its
    pending prefixes only those that are computed where they are pending. arriving: prefixes that are on their way to a
    worker by a hand-over: what is on its way need not be computed nor sent twice, but is not there yet."""
    hit, num_tokens = choice.hit, context.num_tokens
    found_here = weigh((hit,), context, hit.disk)
    alone_tokens = found_here.terms[0][0]
    choice = msgspec.structs.replace(choice, prefill_tokens=round(alone_tokens))
    if alone_tokens < rules.min_tokens:
        return choice, PrefillOutcome.SHORT
    # A session is where it is decoded.
    there = choose(prefillers, msgspec.structs.replace(context, session=None), rng)
    if there.all_saturated:
        return choice, PrefillOutcome.SATURATED
    sent_tokens = num_tokens - max(hit.gpu, arriving.get(hit.worker, 0))
    handover_tokens = rules.handover_tokens(sent_tokens)
    here_parts = found_here.candidate(0, hit, 0).parts
    there_parts = weigh((there.hit,), context, there.hit.disk).candidate(0, there.hit, 0).parts
    cost_there = there_parts.prefill + there_parts.load + handover_tokens
    running = min(context.weights.burden(hit.worker).requests, DISTURBED_MAX)
    cost_here = here_parts.prefill * (1 + running) + here_parts.load
    if cost_there >= cost_here:
        return choice, PrefillOutcome.CHEAPER_HERE
    text = (
        f"{choice.reason}; computed at {printable(there.hit.worker.route_name)} and handed over: a cost of {cost_there:.0f} "
        f"tokens in place of {cost_here:.0f}"
    )
    return (
        msgspec.structs.replace(
            choice,
            reason=text,
            prefill=there,
            # What is left for it to do before its first token.
            prefill_tokens=round(rules.token_cost * sent_tokens),
            alone_tokens=round(alone_tokens),
        ),
        PrefillOutcome.REMOTE,
    )
