# SPDX-License-Identifier: Apache-2.0
"""The prefixes at which a prompt can resume an earlier prompt of its engine, before events show the blocks. Pure.

Full attention keeps every block, so a prompt can resume at any aligned prefix. The engine keeps a sliding window or a
Mamba state only at checkpoints: where the earlier prompt ends, and where it met blocks of full attention that it could
not use (a junction). Source: vLLM 0.32.0 single_type_kv_cache_manager.py (the mask of each kind), with its default
`retention_interval` of 0.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.model.kvcache.catalog import Catalog, GroupRule


class ResumeRule(msgspec.Struct, frozen=True, gc=False):
    """The rule for the part of an earlier prompt that an engine lets a later prompt reuse."""

    # Every hit is a multiple of this number of tokens.
    align_tokens: int
    # An earlier prompt of at most this length can be resumed at any aligned prefix, and a longer one only at a
    # checkpoint. If this is None, a prompt of any length can be resumed at any aligned prefix.
    whole_tokens: int | None

    def align(self, tokens: int) -> int:
        """Round a number of tokens down to the nearest possible end of a hit."""
        return tokens - tokens % self.align_tokens

    def resumable_tokens(self, num_tokens: int, checkpoints: tuple[int, ...], common_tokens: int) -> int:
        """Return how many tokens of a computed prompt another prompt can reuse.

        Args:
            num_tokens: The length of the computed prompt.
            checkpoints: The positions, besides its end, at which the engine keeps its windows and states.
            common_tokens: The length of the common prefix of both prompts, without the last token of the other prompt.
        """
        if self.whole_tokens is None:
            return self.align(min(common_tokens, num_tokens))
        end = self.align(num_tokens - 1)
        if end <= self.whole_tokens:
            return self.align(min(common_tokens, end))
        return max((tokens for tokens in (end, *checkpoints) if tokens <= common_tokens), default=0)


def resume_rule(catalog: Catalog) -> ResumeRule | None:
    """Return the rule of an engine with this catalog, or None while the catalog is incomplete."""
    if catalog.problem is not None:
        return None
    whole_lengths: list[int] = []
    for group in catalog.cacheable:
        if group.rule is GroupRule.MAMBA:
            whole_lengths.append(0)
        elif group.rule is GroupRule.SLIDING_WINDOW and not catalog.whole_windows:
            # The length of the blocks that the window covers at the end of a prompt. In a prompt that is not longer,
            # no block is missing.
            window = group.sliding_window or 0
            whole_lengths.append(-(-(window - 1) // group.block_size) * group.block_size)
    return ResumeRule(max(1, catalog.align), min(whole_lengths) if whole_lengths else None)
