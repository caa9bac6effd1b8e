# SPDX-License-Identifier: Apache-2.0
"""What it costs a worker to take a prompt: one number in tokens, lower wins. Pure.

    cost = slowness * (prefill + queued) + decode + delay - junction - session

prefill: what the worker must still do for this prompt before its first token, in tokens it would compute in the same
time. queued: the same of all prompts before it there, less what is computed of the one under way. decode: what the
sequences that run there take from prefill. delay: what prompts to come will wait longer. junction: a bonus for the
worker that will keep a checkpoint where the prompt leaves what it knows. session: one for the worker that has the
session.
Invariants: a cost is a whole number, so equal costs are equal, and ties are real; of two workers the one that is no
worse in any respect costs no more."""

from __future__ import annotations

import msgspec

from kvrouter.router.load.worker_speed import DEFAULT_TIER_COSTS, TierCosts
from kvrouter.router.matching.question import Hit

# What a token of context that is being decoded costs a new prompt. Its chunks share their steps with the running
# sequences, and a sequence of some thousand tokens takes 0.2 to 0.4 ms of a step (simulator/engine/timing.py), as much
# as 4 to 6 tokens of prefill, in each of the one to three steps of a prompt. docs/reference/benchmarks.md has what more
# brings: longer queues elsewhere.
DECODE_TOKEN_COST = 0.001

# A worker may hold full attention's blocks of a hybrid model's prompt further than anybody can resume at, as windows or
# states there were not kept. Where such a prompt leaves that run, vLLM keeps a checkpoint (a junction), so the next
# prompt with this beginning does resume there: for that part, computing it there is worth nearly as much as a hit.
# Below 1, so that of two equal lengths the actual hit wins. docs/reference/benchmarks.md has what it brings; with 0.25
# a short queue outweighs most of it.
JUNCTION_SHARE = 0.9

# Computing a prompt keeps those back that come after it, and evicts what they might have reused. By queueing theory
# (one server, first come first served, arrivals by chance, mean work m, load r) work x behind queued work q makes all
# later ones together wait r / (1 - r) * x * (2 * q + x) / (2 * m) longer: once that at a load of a half. What is
# evicted by a second copy of a prefix, and computed again for it, costs more than the wait; how much depends on the
# workload. By a sweep from 0 to 16 (docs/reference/benchmarks.md): up to here reuse grows and first tokens come as
# soon, or sooner under load; beyond, they come later.
DELAY_WEIGHT = 8.0

# A bonus and never a rule: of what the session's worker would have to compute anyway. Where its cache is known, the hit
# says what the session is worth there, and the bonus only decides what is nearly equal. Where nothing is known of it
# (text that was not tokenized, a worker without events), the last prompt of the session is most likely still there.
SESSION_SHARE_KNOWN = 0.05
SESSION_SHARE_BLIND = 0.5


class CostTerms(msgspec.Struct, frozen=True):
    """The terms of one worker's cost, in tokens, each as it goes into the sum."""

    prefill: int
    queued: int
    decode: int
    delay: int
    junction: int
    session: int

    @property
    def load(self) -> int:
        return self.queued + self.decode


def prefill_tokens(hit: Hit, num_tokens: int, pending: int = 0, tiers: TierCosts = DEFAULT_TIER_COSTS) -> float:
    """What the prompt costs where this is its hit. pending: tokens that another prompt is just having computed
    there."""
    tokens = num_tokens - hit.disk + (hit.cpu - hit.gpu) * tiers.cpu + (hit.disk - hit.cpu) * tiers.disk
    return min(tokens, num_tokens - pending) if pending else tokens


def junction_tokens(hit: Hit, longest: int) -> int:
    """What a checkpoint there would add to what the next prompt with this beginning can reuse. longest: hit of all
    workers."""
    return max(0, hit.full_attention - longest)


def delay_tokens(work: float, queued: float, usual: float) -> float:
    """What prompts to come will wait longer, all together, for `work` tokens behind `queued` ones. usual: a prompt's on
    average.

    Source: the M/G/1 queue's relative value, r / (1 - r) * u * u / (2 * m) for u tokens of work in it; here its
    difference."""
    return DELAY_WEIGHT / (2 * usual) * work * (2 * queued + work)


def session_bonus(last_tokens: int, prefill: float, known: bool) -> float:
    """last_tokens: length of the session's last prompt. known: whether the worker's cache is."""
    return min(last_tokens, prefill) * (SESSION_SHARE_KNOWN if known else SESSION_SHARE_BLIND)
