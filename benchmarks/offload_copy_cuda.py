# SPDX-License-Identifier: Apache-2.0
"""Claim: on CUDA, the CPU tier copies scattered blocks nearly as fast as one contiguous copy, given pinned memory.

The claim is for copies between scattered blocks and scattered slots, in both directions, beside one copy of as many
bytes in one piece. The side to compare with is torch's copy_ between the device and pinned memory, in the same
direction. All sides take turns, round by round; the table has medians over the rounds, and median and quartiles of the
ratios of each round. A copy's time is the time that the calling thread waits, with the making of its addresses. The
script needs an environment with vLLM for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.offload_copy import SEED, SPREAD, gigabytes_per_s
from benchmarks.offload_speeds import Line, line, run_copies

if TYPE_CHECKING:
    from kvrouter.engine_patch.offload.memory.device_transfers import DeviceCopy
    from kvrouter.engine_patch.offload.memory.slot_layout import Plan

# From the block of one layer in a small model to the whole block of a large model whose layers are packed.
PAGE_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20)


def measure(page_bytes: int, blocks_per_chunk: int, size: int, rounds: int) -> list[Line]:
    """Measure both directions of one page size."""
    import numpy as np
    import torch

    from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches, PageRef, PageTensor
    from kvrouter.engine_patch.offload.memory.cuda_copier import CudaCopier
    from kvrouter.engine_patch.offload.memory.region import Region
    from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, SlotLayout

    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here, or torch is its CPU build")
    blocks = size // page_bytes
    num_blocks = SPREAD * blocks
    num_slots = num_blocks // blocks_per_chunk
    cache = torch.ones((num_blocks, page_bytes), dtype=torch.int8, device="cuda")
    caches = CanonicalCaches([PageTensor(cache, page_bytes)], [[PageRef(0, page_bytes)]])
    regions = [Region.create_or_open(None, num_slots, page_bytes * blocks_per_chunk) for _ in range(2)]
    copiers = []
    for region in regions:
        slots = region.rank_tensor()
        slots.fill_(1)
        is_pinned = region is regions[0]
        if is_pinned and not region.pin():
            raise SystemExit("the CUDA driver does not pin this much memory")
        layout = SlotLayout(caches.page_bytes, blocks_per_chunk, region.rank_bytes)
        copiers.append(CudaCopier(caches, layout, slots, is_pinned=is_pinned))
    pinned, pageable = copiers
    near = torch.ones(size, dtype=torch.int8, device="cuda")
    far = torch.ones(size, dtype=torch.int8, pin_memory=True)
    rng = np.random.default_rng(SEED)

    def plan() -> Plan:
        chosen = rng.permutation(num_slots)[: blocks // blocks_per_chunk]
        return (GroupPart(0, rng.permutation(num_blocks)[:blocks], 0, chosen),)

    def whole(begin: Callable[[Plan], DeviceCopy], plan: Plan) -> None:
        begin(plan).wait()

    def one_piece(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    speeds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        sides: dict[str, Callable[[], object]] = {
            "store": partial(whole, pinned.begin_store, plan()),
            "store, one piece": partial(one_piece, far, near),
            "store, pageable": partial(whole, pageable.begin_store, plan()),
            "load": partial(whole, pinned.begin_load, plan()),
            "load, one piece": partial(one_piece, near, far),
            "load, pageable": partial(whole, pageable.begin_load, plan()),
        }
        torch.cuda.synchronize()
        for name, copy in sides.items():
            speed = gigabytes_per_s(copy, size)
            # The first round is not counted, as it loads code and page tables.
            if turn:
                speeds.setdefault(name, []).append(speed)
    for region in regions:
        region.close()
    columns = {"tier": "", "one piece": ", one piece", "tier, not pinned": ", pageable"}
    return [
        line(
            direction,
            page_bytes,
            {side: speeds[f"{direction}{which}"] for side, which in columns.items()},
            blocks_per_chunk,
        )
        for direction in ("store", "load")
    ]


def software() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


if __name__ == "__main__":
    run_copies("offload_copy_cuda", __doc__, PAGE_BYTES, measure, software)
