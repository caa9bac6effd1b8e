# SPDX-License-Identifier: Apache-2.0
"""An engine's description of its KV cache, from its metrics page."""

from __future__ import annotations

from kvrouter.contract.worker_status import MAX_COUNT, EngineCache

CACHING_OFF = "its prefix caching is off by its own metrics page, so it computes every prompt in full"


def cache_problem(cache: EngineCache) -> str:
    """Return why an engine reuses nothing, by its own description, or "" if it reuses prompts or does not say."""
    return CACHING_OFF if cache.prefix_caching is False else ""


def positive_count(text: bytes) -> int | None:
    """Return the count in a label or a sample, or None if there is none.

    Engines print `None` for unknown values, and samples are floats (`128.0`).
    """
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        return None
    return count if 0 < count <= MAX_COUNT else None
