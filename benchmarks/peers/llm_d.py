# SPDX-License-Identifier: Apache-2.0
"""The commands by which llm-d's router records in Redis that a pod holds a block. Pure.

Each block has a hash, named by llm-d's own number of the block, with a field for each pod; and a key from the engine's
number of the block to that name. Source: llm-d's pkg/kvcache/kvblock, February (pod@tier fields) and October 2026 (JSON
fields).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvrouter.router.base.redis_client.resp import command

TIER_FIELDS, JSON_FIELDS = "llm-d, pod@tier fields", "llm-d, JSON fields"


def commands(layout: str, pod: str, engine_numbers: Sequence[int], own_numbers: Sequence[int]) -> Iterator[bytes]:
    """Yield the commands for some blocks of a pod.

    Args:
        layout: TIER_FIELDS or JSON_FIELDS.
        pod: The pod that holds the blocks.
        engine_numbers: The engine's number of each block.
        own_numbers: llm-d's own number of each block.
    """
    entry = {"PodIdentifier": pod, "DeviceTier": "gpu", "Speculative": False, "HasGroup": True, "GroupIdx": 0}
    field = f"{pod}@gpu" if layout == TIER_FIELDS else json.dumps(entry, separators=(",", ":"))
    for engine, own in zip(engine_numbers, own_numbers, strict=True):
        key = f"engine:{engine}"
        yield command("SET", key, own) if layout == TIER_FIELDS else command("ZADD", key, 0, own)
        yield command("HSET", own, field, "")
