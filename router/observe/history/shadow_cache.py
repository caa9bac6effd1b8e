# SPDX-License-Identifier: Apache-2.0
"""The size of one worker's cache and the blocks that a prompt takes, as the round-robin shadow counts them. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.model.kvcache.catalog import Catalog, GroupRule
from kvrouter.router.model.kvcache.resume_rule import resume_rule
from kvrouter.router.route.load.prefix_tree import PIECE_TOKENS


class WorkerCache(NamedTuple):
    """A worker's cache as its engine and its events describe it."""

    worker: WorkerKey
    engine: EngineCache
    catalog: Catalog


def worker_caches(registry: WorkerRegistry) -> dict[str, list[WorkerCache]]:
    """Return the caches of each model's workers that are not down."""
    return {
        model: [WorkerCache(state.worker, state.cache, state.view.catalog) for state in states]
        for model, states in registry.states_by_model().items()
    }


class ShadowCache(NamedTuple):
    """The size of a cache and the costs in it, in blocks summed over all groups."""

    # The size of the cache, or None if it is not known.
    blocks: float | None
    # The blocks that a piece of PIECE_TOKENS takes in the groups that keep all of a prompt.
    piece_blocks: float = 1.0
    # The blocks that a checkpoint takes in the groups that keep only a window or a state of a prompt.
    checkpoint_blocks: float = 0.0
    # A prompt of at most this many tokens can be resumed at any piece, and a longer one only at a checkpoint. None
    # means that any prompt can be resumed at any piece.
    whole_tokens: int | None = None


def shadow_cache(engine: EngineCache, catalog: Catalog) -> ShadowCache:
    """Return the size of a worker's cache and the costs in it, as far as its catalog is complete.

    Without a complete catalog it counts as one group of full attention, with the tokens that the engine states.
    """
    rule = resume_rule(catalog)
    if engine.prefix_caching is False:
        return ShadowCache(0.0)
    if rule is None or not catalog.cacheable:
        return ShadowCache(None if engine.tokens is None else engine.tokens / PIECE_TOKENS)
    piece_blocks = checkpoint_blocks = 0.0
    for group in catalog.cacheable:
        if group.rule is GroupRule.MAMBA:
            checkpoint_blocks += 1
        elif group.rule is GroupRule.SLIDING_WINDOW:
            checkpoint_blocks += math.ceil(((group.sliding_window or 1) - 1) / group.block_size)
        else:
            piece_blocks += PIECE_TOKENS / group.block_size
    return ShadowCache(
        None if engine.blocks is None else float(engine.blocks), piece_blocks, checkpoint_blocks, rule.whole_tokens
    )
