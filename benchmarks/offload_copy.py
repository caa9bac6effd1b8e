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

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks import engine_venv
from benchmarks.report import Others, Result, machine, markdown, number, progress, quartiles, save

if TYPE_CHECKING:
    from kvrouter.engine_patch.offload.memory.slot_layout import Plan

PAGE_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10)
BLOCKS_PER_CHUNK = (1, 4)

# The bytes of one transfer: about four requests of 8,192 tokens, and several times what a processor's caches hold.
TRANSFER_BYTES = 256 * 2**20
QUICK_TRANSFER_BYTES = 16 * 2**20
# There are this many times as many blocks and slots as a transfer picks, so that its picks are scattered.
SPREAD = 2
ROUNDS = 15
QUICK_ROUNDS = 3
SEED = 20261


class Line(msgspec.Struct):
    """One direction of one size. Speeds are medians, in GB/s of bytes copied."""

    direction: str
    page_bytes: int
    blocks_per_chunk: int
    ours: float
    # Torch's contiguous copy, with all threads and with one.
    one_piece: float
    one_thread: float
    # The ratios of `ours` to `one_piece` and to `one_thread`, round by round: (lower quartile, median, upper quartile).
    ratio: tuple[float, float, float]
    ratio_one_thread: tuple[float, float, float]
    rounds: dict[str, list[float]]


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
    return [line(direction, page_bytes, blocks_per_chunk, speeds) for direction in ("store", "load")]


def line(direction: str, page_bytes: int, blocks_per_chunk: int, found: dict[str, list[float]]) -> Line:
    ours, one_piece, one_thread = found[direction], found["one piece"], found["one thread"]
    return Line(
        direction,
        page_bytes,
        blocks_per_chunk,
        statistics.median(ours),
        statistics.median(one_piece),
        statistics.median(one_thread),
        quartiles(ours, one_piece),
        quartiles(ours, one_thread),
        {"ours": ours, "one piece": one_piece, "one thread": one_thread},
    )


def table(rows: Sequence[Line]) -> str:
    lines: list[tuple[str, ...]] = [
        ("copy", "page", "k", "tier", "one piece", "one thread", "ratio", "quartiles", "to one thread")
    ]
    for row in rows:
        lines.append(
            (
                row.direction,
                f"{row.page_bytes // 2**10} KiB",
                str(row.blocks_per_chunk),
                *(f"{number(value)} GB/s" for value in (row.ours, row.one_piece, row.one_thread)),
                f"{row.ratio[1]:.2f}",
                f"{row.ratio[0]:.2f} to {row.ratio[2]:.2f}",
                f"{row.ratio_one_thread[1]:.2f}",
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

    size = QUICK_TRANSFER_BYTES if arguments.quick else TRANSFER_BYTES
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    result: Result[Line] = Result("offload_copy", arguments.quick, machine(), [], [])
    others = Others()
    for page_bytes in PAGE_BYTES:
        for blocks_per_chunk in BLOCKS_PER_CHUNK:
            progress(f"offload_copy: pages of {page_bytes} bytes, {blocks_per_chunk} blocks a chunk")
            result.rows += measure(page_bytes, blocks_per_chunk, size, rounds)
    result.notes += [
        f"{rounds} rounds of {size // 2**20} MiB a copy; torch {torch.__version__}, {torch.get_num_threads()} threads",
        others.note(),
    ]
    save(result, arguments.json)
    print(table(result.rows))
    for note in result.notes:
        print(f"- {note}")


if __name__ == "__main__":
    main()
