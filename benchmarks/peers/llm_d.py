# SPDX-License-Identifier: Apache-2.0
"""What llm-d's router writes to Redis for a block that a pod holds. Pure.

For each block a hash named by llm-d's own number of it, with a field for each pod, and a key that leads there from the
engine's number. Source: its pkg/kvcache/kvblock, February (pod@tier fields) and October 2026 (JSON fields).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvrouter.router.base.redis_client.resp import command

TIER_FIELDS, JSON_FIELDS = "llm-d, pod@tier fields", "llm-d, JSON fields"


def commands(layout: str, pod: str, engine_numbers: Sequence[int], own_numbers: Sequence[int]) -> Iterator[bytes]:
    """engine_numbers, own_numbers: of the same blocks."""
    entry = {"PodIdentifier": pod, "DeviceTier": "gpu", "Speculative": False, "HasGroup": True, "GroupIdx": 0}
    field = f"{pod}@gpu" if layout == TIER_FIELDS else json.dumps(entry, separators=(",", ":"))
    for engine, own in zip(engine_numbers, own_numbers, strict=True):
        key = f"engine:{engine}"
        yield command("SET", key, own) if layout == TIER_FIELDS else command("ZADD", key, 0, own)
        yield command("HSET", own, field, "")
