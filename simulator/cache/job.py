# SPDX-License-Identifier: Apache-2.0
"""A request on its way through one replica: its text, how much of it is computed, and its blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvrouter.simulator.cache.pool import Block
from kvrouter.simulator.cache.text import Text


@dataclass(slots=True)
class Table:
    """One request's blocks in one group, by position; the null block where none is kept.

    cached_blocks: positions that were offered to the cache already. retired_blocks and last_state: Mamba only.
    """

    blocks: list[Block] = field(default_factory=list)
    cached_blocks: int = 0
    retired_blocks: int = 0
    last_state: int | None = None


class Handover(enum.Enum):
    """A request's part in disaggregated prefill (P/D)."""

    NONE = enum.auto()
    # It is to be continued elsewhere: when it ends it says which blocks hold its prompt.
    GIVES = enum.auto()
    # Another replica computed its prompt: its blocks are received, not computed.
    TAKES = enum.auto()


@dataclass(slots=True, eq=False)
class Job:
    """One request. Lengths in tokens.

    computed: tokens whose KV is there, or will be after the step or the load under way. quiet_until: up to this length
    a step of one token needs nothing from any group, so that most decode steps touch no block. reused: found in the
    GPU's cache when it was first admitted; loaded: brought from elsewhere then (CPU tier, another replica). junction:
    see PrefixHit. loading: a load writes into its blocks; committed: what a load has written is findable. given_blocks:
    by group, what it left to another replica.
    """

    text: Text
    prompt_tokens: int
    max_tokens: int
    tables: list[Table]
    computed: int = 0
    quiet_until: int = 0
    junction: int = 0
    reused: int | None = None
    loaded: int = 0
    last_token: int = -1
    preemptions: int = 0
    running: bool = False
    handover: Handover = Handover.NONE
    given_blocks: list[list[int]] = field(default_factory=list)
    loading: bool = False
    committed: bool = True
    finished: bool = False
    aborted: bool = False

    @property
    def sampled(self) -> int:
        """Tokens generated so far."""
        return self.text.num_tokens - self.prompt_tokens

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed, as `usage` reports them. 0 before it is admitted."""
        return (self.reused or 0) + self.loaded

    @property
    def prefill_end(self) -> int:
        """Where prefill ends: a resumed request computes its own output again. Source: scheduler.py:468."""
        return max(self.prompt_tokens, self.text.num_tokens - 1)
