# SPDX-License-Identifier: Apache-2.0
"""Clears that name their medium, reported at once: vLLM's own names none and waits for the next engine step.

vLLM's queue and its timing stay as they are: what it holds at a reset is only marked, so that our topic does not report
it again. Source: vLLM 0.32.0 v1/core/block_pool.py, reset_prefix_cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrouter.engine_patch.hooks.positions import note
from kvrouter.engine_patch.reporter.translate import Notes, medium_name
from kvrouter.engine_patch.setup.features import Feature, misfit

REASON = "prefix cache reset"


def watch(pool: Any, medium: str, notes: Notes, cleared: Callable[[str, str], None], feature: Feature) -> None:
    """Wrap one block pool's reset, on the instance. medium: what the pool's blocks are reported as."""

    def apply() -> None:
        original = pool.reset_prefix_cache

        def reset_prefix_cache(*given: Any, **named: Any) -> Any:
            done = original(*given, **named)
            if done:
                try:
                    if feature.on:
                        void(pool, medium, notes)
                except Exception:
                    feature.failed()
                # Report it even after a failure: vLLM's queue may still hold events, and its own clear comes after
                # them.
                cleared(medium, REASON)
            return done

        pool.reset_prefix_cache = reset_prefix_cache

    feature.install(lambda: misfit(pool, "reset_prefix_cache", ()), apply)


def void(pool: Any, medium: str, notes: Notes) -> None:
    """Mark the events that the pool still holds of this medium as unreported: the clear covers them and comes first.

    Pools may share one queue. A pool may also name another medium than its blocks are reported as, until they are
    taken.
    """
    own = {medium, medium_name(getattr(pool, "medium", None))}
    for event in pool.kv_event_queue:
        if type(event).__name__ == "AllBlocksCleared" or medium_name(event.medium) in own:
            note(notes, event, None)
