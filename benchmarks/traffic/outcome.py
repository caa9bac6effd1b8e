# SPDX-License-Identifier: Apache-2.0
"""The outcome of one policy on one shape, and its comparison with the best of the others. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

# Added to both sides of a ratio, so that differences that no user would notice do not count.
REUSE_SHARE_ADDED = 0.005
TTFT_ADDED_S = 0.002
# A peer is ahead where it is better by this share; a peer whose first tokens are later than ours by at most this share
# counts as no later.
AHEAD_SHARE = 0.03
# Bounds: one cache with all the memory, and one whose memory never ends, which no choice can surpass.
POOLED = "pooled"
ENDLESS = "endless"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run, in tokens and in seconds of virtual time. POOLED and ENDLESS have reuse alone."""

    seed: int
    number: int
    rotation: bool
    policy: str
    requests: int
    prompt_tokens: int
    reused_tokens: int
    ttft_mean_s: float
    ttft_p99_s: float
    # The time until the last request ended.
    span_s: float
    wall_s: float

    @property
    def reuse(self) -> float:
        """The share of the prompts' tokens that was not computed."""
        return self.reused_tokens / max(1, self.prompt_tokens)

    @property
    def per_second(self) -> float:
        """Requests a second until the last one ended."""
        return self.requests / max(1e-9, self.span_s)


class Verdict(msgspec.Struct, frozen=True):
    """Our policy on one shape beside the best of the peers; above 1 is better.

    Each figure has its own best peer, the champion.
    """

    reuse: float
    # Our reuse by that of the best peer whose first tokens are at most AHEAD_SHARE later than ours.
    reuse_among_soon: float
    ttft: float
    throughput: float
    of_pooled: float
    of_endless: float
    # The peers that are ahead in both reuse and first tokens.
    ahead: tuple[str, ...]
    # The champions of reuse, of reuse among soon, of first tokens and of throughput.
    champions: tuple[str, str, str, str]


def verdict(own: Outcome, peers: Sequence[Outcome], pooled: Outcome, endless: Outcome) -> Verdict:
    """Compare one run with its peers' and the bounds' on the same shape."""
    most_reuse = max(peers, key=lambda peer: peer.reuse)
    soonest = min(peers, key=lambda peer: peer.ttft_mean_s)
    fastest = max(peers, key=lambda peer: peer.per_second)
    soon = [peer for peer in peers if ttft_ratio(own, peer) <= 1 + AHEAD_SHARE]
    # Where every peer is later than that, our policy gave up no reuse.
    best_soon = max(soon, key=lambda peer: peer.reuse, default=own)
    ahead = [
        peer.policy
        for peer in peers
        if reuse_ratio(own, peer) < 1 / (1 + AHEAD_SHARE) and ttft_ratio(own, peer) < 1 / (1 + AHEAD_SHARE)
    ]
    return Verdict(
        reuse_ratio(own, most_reuse),
        reuse_ratio(own, best_soon),
        ttft_ratio(own, soonest),
        own.per_second / fastest.per_second,
        reuse_ratio(own, pooled),
        reuse_ratio(own, endless),
        tuple(ahead),
        (most_reuse.policy, best_soon.policy, soonest.policy, fastest.policy),
    )


def reuse_ratio(own: Outcome, other: Outcome) -> float:
    """Return our reuse by the other's: above 1 where ours is more."""
    return (own.reuse + REUSE_SHARE_ADDED) / (other.reuse + REUSE_SHARE_ADDED)


def ttft_ratio(own: Outcome, other: Outcome) -> float:
    """Return the other's time to the first token by ours: above 1 where ours is sooner."""
    return (other.ttft_mean_s + TTFT_ADDED_S) / (own.ttft_mean_s + TTFT_ADDED_S)


def mean(values: Iterable[float]) -> float:
    """Return the mean, or NaN if there are no values."""
    kept = list(values)
    return sum(kept) / len(kept) if kept else math.nan


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of values above 0, or NaN if there are none."""
    return math.exp(mean(map(math.log, values)))


def by_shape(outcomes: Iterable[Outcome]) -> dict[tuple[int, int, bool], Mapping[str, Outcome]]:
    """Group the outcomes by their shape, and within a shape by policy."""
    groups: dict[tuple[int, int, bool], dict[str, Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.seed, outcome.number, outcome.rotation), {})[outcome.policy] = outcome
    return dict(groups)
