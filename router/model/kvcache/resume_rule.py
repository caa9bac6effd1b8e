# SPDX-License-Identifier: Apache-2.0
"""Where a prompt can resume in what an earlier prompt of the same engine leaves, before any event shows it. Pure.

Full attention keeps every block, so any aligned prefix will do. A sliding window or a Mamba state is kept only at
checkpoints: where the earlier prompt ends, and where it met blocks of full attention that it could not use (a
junction). Source: vLLM 0.32.0 single_type_kv_cache_manager.py (the mask of each kind), with its default
`retention_interval` of 0.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.model.kvcache.catalog import Catalog, GroupRule


class ResumeRule(msgspec.Struct, frozen=True, gc=False):
    """The part of an earlier prompt that an engine lets a later one reuse."""

    # Every hit is a multiple of this.
    align_tokens: int
    # An earlier prompt of at most this length can be resumed at any aligned prefix, a longer one only at a
    # checkpoint; None: any prompt can.
    whole_tokens: int | None

    def align(self, tokens: int) -> int:
        """Round down to where a hit can end."""
        return tokens - tokens % self.align_tokens

    def resumable_tokens(self, num_tokens: int, checkpoints: tuple[int, ...], common_tokens: int) -> int:
        """Return how much of a computed prompt can be reused by another one.

        Args:
            num_tokens: Length of the computed prompt.
            checkpoints: Where windows and states of it are kept besides its end.
            common_tokens: How far the other prompt is the same, its own last token left out.
        """
        if self.whole_tokens is None:
            return self.align(min(common_tokens, num_tokens))
        end = self.align(num_tokens - 1)
        if end <= self.whole_tokens:
            return self.align(min(common_tokens, end))
        return max((tokens for tokens in (end, *checkpoints) if tokens <= common_tokens), default=0)


def resume_rule(catalog: Catalog) -> ResumeRule | None:
    """Return the rule of an engine with these groups, None while they are not known."""
    if catalog.problem is not None:
        return None
    whole: list[int] = []
    for group in catalog.cacheable:
        if group.rule is GroupRule.MAMBA:
            whole.append(0)
        elif group.rule is GroupRule.SLIDING_WINDOW and not catalog.whole_windows:
            # The blocks that the window of a prompt's end covers; where they reach its start, none is missing.
            window = group.sliding_window or 0
            whole.append(-(-(window - 1) // group.block_size) * group.block_size)
    return ResumeRule(max(1, catalog.align), min(whole) if whole else None)
