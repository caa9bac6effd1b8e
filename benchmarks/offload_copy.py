# SPDX-License-Identifier: Apache-2.0
"""Claim: the CPU tier copies scattered blocks at a good part of the speed of one contiguous copy of as many bytes.

The claim is for small pages and large ones, and for chunks of one block and of four. A copy goes between scattered
blocks and scattered slots. It is compared with torch's copy_ of contiguous tensors, once with all of torch's threads
and once with one thread; the tier's copy uses one thread too, which leaves the others to the engine. All sides take
turns, round by round; the table has medians over the rounds, and median and quartiles of the ratios of each round. The
script runs in the venv of the engine tests, which it enters by itself, and builds when it is missing. The memory of
blocks and slots was written to before; it is much more than the processor's caches hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.offload_speeds import Line, line, run_copies

if TYPE_CHECKING:
    from kvrouter.engine_patch.offload.memory.slot_layout import Plan

PAGE_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10)

# There are this many times as many blocks and slots as a transfer picks, so that its picks are scattered.
SPREAD = 2
SEED = 20261


def gigabytes_per_s(copy: Callable[[], object], size: int) -> float:
    start = time.perf_counter()
    copy()
    return size / (time.perf_counter() - start) / 1e9


def measure(page_bytes: int, blocks_per_chunk: int, size: int, rounds: int) -> list[Line]:
    """Measure both directions of one page size."""
    import numpy as np
    import torch

    from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches, PageRef, PageTensor
    from kvrouter.engine_patch.offload.memory.copier import CpuCopier
    from kvrouter.engine_patch.offload.memory.region import Region
    from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, SlotLayout

    blocks = size // page_bytes
    num_blocks = SPREAD * blocks
    num_slots = num_blocks // blocks_per_chunk
    cache = torch.ones((num_blocks, page_bytes), dtype=torch.int8)
    caches = CanonicalCaches([PageTensor(cache, page_bytes)], [[PageRef(0, page_bytes)]])
    region = Region.create_or_open(None, num_slots, page_bytes * blocks_per_chunk)
    slots = region.rank_tensor()
    slots.fill_(1)
    copier = CpuCopier(caches, SlotLayout(caches.page_bytes, blocks_per_chunk, region.rank_bytes), slots)
    source, target = torch.ones(size, dtype=torch.int8), torch.ones(size, dtype=torch.int8)
    rng = np.random.default_rng(SEED)
    threads = torch.get_num_threads()

    def plan() -> Plan:
        chosen = rng.permutation(num_slots)[: blocks // blocks_per_chunk]
        return (GroupPart(0, rng.permutation(num_blocks)[:blocks], 0, chosen),)

    speeds: dict[str, list[float]] = {"store": [], "load": [], "one piece": [], "one thread": []}
    for turn in range(rounds + 1):
        round_speeds = {}
        for name, copy in (("store", copier.store), ("load", copier.load)):
            round_speeds[name] = gigabytes_per_s(partial(copy, plan()), size)
        round_speeds["one piece"] = gigabytes_per_s(lambda: target.copy_(source), size)
        torch.set_num_threads(1)
        round_speeds["one thread"] = gigabytes_per_s(lambda: target.copy_(source), size)
        torch.set_num_threads(threads)
        # The first round is not counted, as it loads code and page tables.
        if turn:
            for name, value in round_speeds.items():
                speeds[name].append(value)
    del copier, slots
    region.close()
    others = {side: speeds[side] for side in ("one piece", "one thread")}
    return [
        line(direction, page_bytes, {"tier": speeds[direction]} | others, blocks_per_chunk)
        for direction in ("store", "load")
    ]


def software() -> str:
    import torch

    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    run_copies("offload_copy", __doc__, PAGE_BYTES, measure, software)
