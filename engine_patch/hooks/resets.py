# SPDX-License-Identifier: Apache-2.0
"""Clears that name their medium and are reported at once.

vLLM's own clear names no medium and waits for the next engine step. vLLM's queue and its timing stay unchanged: the
events in it at a reset are only marked, so that the patch's topic does not report them again.
Source: vLLM 0.32.0 v1/core/block_pool.py, reset_prefix_cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrouter.engine_patch.hooks.positions import note
from kvrouter.engine_patch.reporter.translate import Notes, medium_name
from kvrouter.engine_patch.setup.features import Feature, misfit

REASON = "prefix cache reset"


def watch(pool: Any, medium: str, notes: Notes, cleared: Callable[[str, str], None], feature: Feature) -> None:
    """Wrap one block pool's reset on the instance.

    Args:
        pool: The block pool.
        medium: The medium under which the pool's blocks are reported.
        notes: Receives a note for each event that must not be reported.
        cleared: Called with medium and reason after a reset.
        feature: Turned off if the method looks different or fails here.
    """

    def apply() -> None:
        original = pool.reset_prefix_cache

        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            was_reset = original(*args, **kwargs)
            if was_reset:
                try:
                    if feature.on:
                        void(pool, medium, notes)
                except Exception:
                    feature.failed()
                # Report the clear even after a failure: vLLM's queue may still hold events, and vLLM's own clear comes
                # after them.
                cleared(medium, REASON)
            return was_reset

        pool.reset_prefix_cache = reset_prefix_cache

    feature.install(lambda: misfit(pool, "reset_prefix_cache", ()), apply)


def void(pool: Any, medium: str, notes: Notes) -> None:
    """Mark the pool's waiting events of this medium as unreported, because the clear comes first and covers them.

    Pools may share one queue. The pool's own name for the medium may differ from the one under which its blocks are
    reported; the events get the latter only when they are taken.
    """
    names = {medium, medium_name(getattr(pool, "medium", None))}
    for event in pool.kv_event_queue:
        if type(event).__name__ == "AllBlocksCleared" or medium_name(event.medium) in names:
            note(notes, event, None)
