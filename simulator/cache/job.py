# SPDX-License-Identifier: Apache-2.0
"""A request on its way through one replica: its text, how much of the text is computed, and its blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvrouter.simulator.cache.peer import PeerWish
from kvrouter.simulator.cache.pool import Block
from kvrouter.simulator.cache.text import Text


@dataclass(slots=True)
class Table:
    """One request's blocks in one group, by position; the null block where none is kept."""

    blocks: list[Block] = field(default_factory=list)
    # Leading positions that have been offered to the cache.
    cached_blocks: int = 0
    # Mamba only: leading positions whose states `drop_skipped` has gone through.
    retired_blocks: int = 0
    # Mamba only: the position of the state before the running one.
    last_state: int | None = None


class Handover(enum.Enum):
    """The role of a request where one replica computes prompts and another decodes (disaggregated prefill)."""

    NONE = enum.auto()
    # The request is continued elsewhere: when it ends, it reports which blocks hold its prompt.
    GIVES = enum.auto()
    # Another replica computed the prompt: the blocks are received, not computed.
    TAKES = enum.auto()


@dataclass(slots=True, eq=False)
class Job:
    """One request. Lengths in tokens."""

    text: Text
    prompt_tokens: int
    max_tokens: int
    tables: list[Table]
    # Tokens whose KV exists, or will exist after the step or the load under way.
    computed: int = 0
    # Up to this length a step of one token needs nothing from any group, so most decode steps touch no block.
    quiet_until: int = 0
    # See `PrefixHit.junction`.
    junction: int = 0
    # Tokens found in the GPU's cache when the request was first admitted; None before that.
    reused: int | None = None
    # Tokens brought from the CPU tier or from another replica at that time.
    loaded: int = 0
    last_token: int = -1
    preemptions: int = 0
    running: bool = False
    handover: Handover = Handover.NONE
    # The replica from which missing chunks are fetched; None if the request names none.
    peer: PeerWish | None = None
    # By group, the blocks that the request left for another replica.
    given_blocks: list[list[int]] = field(default_factory=list)
    # Whether a load writes into the request's blocks.
    loading: bool = False
    # False from the start of a load until the blocks that it wrote are committed, so that other requests can find them.
    committed: bool = True
    finished: bool = False
    aborted: bool = False

    @property
    def sampled(self) -> int:
        """Tokens generated so far."""
        return self.text.num_tokens - self.prompt_tokens

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed, as `usage` reports them; 0 before the request is admitted."""
        return (self.reused or 0) + self.loaded

    @property
    def prefill_end(self) -> int:
        """Length at which prefill ends: a resumed request computes its own output again. Source: scheduler.py:468."""
        return max(self.prompt_tokens, self.text.num_tokens - 1)
