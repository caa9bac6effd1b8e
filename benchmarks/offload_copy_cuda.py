# SPDX-License-Identifier: Apache-2.0
"""Claim: on CUDA, the CPU tier copies scattered blocks nearly as fast as one contiguous copy, given pinned memory.

The claim is for copies between scattered blocks and scattered slots, in both directions, beside one copy of as many
bytes in one piece. The side to compare with is torch's copy_ between the device and pinned memory, in the same
direction. All sides take turns, round by round; the table has medians over the rounds, and median and quartiles of the
ratios of each round. A copy's time is the time that the calling thread waits, with the making of its addresses. The
script needs an environment with vLLM for CUDA.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks import engine_venv
from benchmarks.offload_copy import (
    BLOCKS_PER_CHUNK,
    QUICK_ROUNDS,
    QUICK_TRANSFER_BYTES,
    ROUNDS,
    SEED,
    SPREAD,
    TRANSFER_BYTES,
    gigabytes_per_s,
)
from benchmarks.report import Others, Result, machine, markdown, number, progress, quartiles, save

if TYPE_CHECKING:
    from kvrouter.engine_patch.offload.memory.slot_layout import Plan

# From the block of one layer in a small model to the whole block of a large model whose layers are packed.
PAGE_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20)


class Line(msgspec.Struct):
    """One direction of one size. Speeds are medians, in GB/s of bytes copied."""

    direction: str
    page_bytes: int
    blocks_per_chunk: int
    # The tier's copy with pinned slots.
    ours: float
    # Torch's contiguous copy.
    one_piece: float
    # The tier's copy with slots that are not pinned.
    pageable: float
    # The ratios of `ours` to `one_piece`, round by round: (lower quartile, median, upper quartile).
    ratio: tuple[float, float, float]
    rounds: dict[str, list[float]]


def measure(page_bytes: int, blocks_per_chunk: int, size: int, rounds: int) -> list[Line]:
    """Measure both directions of one page size."""
    import numpy as np
    import torch

    from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches, PageRef, PageTensor
    from kvrouter.engine_patch.offload.memory.cuda_copier import CudaCopier
    from kvrouter.engine_patch.offload.memory.region import Region
    from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, SlotLayout

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
        copiers.append(CudaCopier(caches, SlotLayout(caches.page_bytes, blocks_per_chunk, region.rank_bytes), slots))
    pinned, pageable = copiers
    if not regions[0].pin():
        raise SystemExit("the CUDA driver does not pin this much memory")
    near = torch.ones(size, dtype=torch.int8, device="cuda")
    far = torch.ones(size, dtype=torch.int8, pin_memory=True)
    rng = np.random.default_rng(SEED)

    def plan() -> Plan:
        chosen = rng.permutation(num_slots)[: blocks // blocks_per_chunk]
        return (GroupPart(0, rng.permutation(num_blocks)[:blocks], 0, chosen),)

    def one_piece(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    speeds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        sides: dict[str, Callable[[], object]] = {
            "store": partial(pinned.store, plan(), pinned.fence()),
            "store, one piece": partial(one_piece, far, near),
            "store, pageable": partial(pageable.store, plan(), pageable.fence()),
            "load": partial(pinned.load, plan(), pinned.fence()),
            "load, one piece": partial(one_piece, near, far),
            "load, pageable": partial(pageable.load, plan(), pageable.fence()),
        }
        torch.cuda.synchronize()
        for name, copy in sides.items():
            speed = gigabytes_per_s(copy, size)
            # The first round is not counted, as it loads code and page tables.
            if turn:
                speeds.setdefault(name, []).append(speed)
    for region in regions:
        region.close()
    return [line(direction, page_bytes, blocks_per_chunk, speeds) for direction in ("store", "load")]


def line(direction: str, page_bytes: int, blocks_per_chunk: int, found: dict[str, list[float]]) -> Line:
    ours, one_piece, pageable = (found[f"{direction}{which}"] for which in ("", ", one piece", ", pageable"))
    return Line(
        direction,
        page_bytes,
        blocks_per_chunk,
        statistics.median(ours),
        statistics.median(one_piece),
        statistics.median(pageable),
        quartiles(ours, one_piece),
        {"ours": ours, "one piece": one_piece, "pageable": pageable},
    )


def table(rows: Sequence[Line]) -> str:
    lines: list[tuple[str, ...]] = [
        ("copy", "page", "k", "tier", "one piece", "ratio", "quartiles", "tier, not pinned")
    ]
    for row in rows:
        lines.append(
            (
                row.direction,
                f"{row.page_bytes // 2**10} KiB",
                str(row.blocks_per_chunk),
                *(f"{number(value)} GB/s" for value in (row.ours, row.one_piece)),
                f"{row.ratio[1]:.2f}",
                f"{row.ratio[0]:.2f} to {row.ratio[2]:.2f}",
                f"{number(row.pageable)} GB/s",
            )
        )
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, with all rounds, to FILE")
    arguments = parser.parse_args()
    engine_venv.enter()
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here, or torch is its CPU build")
    size = QUICK_TRANSFER_BYTES if arguments.quick else TRANSFER_BYTES
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    result: Result[Line] = Result("offload_copy_cuda", arguments.quick, machine(), [], [])
    others = Others()
    for page_bytes in PAGE_BYTES:
        for blocks_per_chunk in BLOCKS_PER_CHUNK:
            progress(f"offload_copy_cuda: pages of {page_bytes} bytes, {blocks_per_chunk} blocks a chunk")
            result.rows += measure(page_bytes, blocks_per_chunk, size, rounds)
    result.notes += [
        f"{rounds} rounds of {size // 2**20} MiB a copy; {torch.cuda.get_device_name()}, torch {torch.__version__}",
        others.note(),
    ]
    save(result, arguments.json)
    print(table(result.rows))
    for note in result.notes:
        print(f"- {note}")


if __name__ == "__main__":
    main()
