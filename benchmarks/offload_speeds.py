# SPDX-License-Identifier: Apache-2.0
"""Speeds of an offload tier beside those of other ways, for the benchmarks of its copies and of its disk."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks import engine_venv
from benchmarks.report import Others, Result, finish, machine, markdown, number, parser_of, progress, quartiles

BLOCKS_PER_CHUNK = (1, 4)
# The bytes of one transfer: about four requests of 8,192 tokens, and several times what a processor's caches hold.
TRANSFER_BYTES = 256 * 2**20
QUICK_TRANSFER_BYTES = 16 * 2**20
ROUNDS = 15
QUICK_ROUNDS = 3


class Line(msgspec.Struct):
    """One case of one size, on each side: the tier first, then the ways to compare it with."""

    case: str
    size_bytes: int
    # The blocks of a chunk; 0 where there are no chunks.
    blocks_per_chunk: int
    # Medians, in GB/s of bytes moved.
    speeds: dict[str, float]
    # Ratios of the tier's speed to each other side's, round by round: (lower quartile, median, upper quartile).
    ratios: dict[str, tuple[float, float, float]]
    rounds: dict[str, list[float]]


def line(case: str, size_bytes: int, rounds: Mapping[str, Sequence[float]], blocks_per_chunk: int = 0) -> Line:
    """Return the line of the speeds in each round, with the tier's side first."""
    ours, *others = rounds
    return Line(
        case,
        size_bytes,
        blocks_per_chunk,
        {side: statistics.median(speeds) for side, speeds in rounds.items()},
        {side: quartiles(rounds[ours], rounds[side]) for side in others},
        {side: list(speeds) for side, speeds in rounds.items()},
    )


def shown_speeds(row: Line) -> list[str]:
    return [f"{number(speed)} GB/s" for speed in row.speeds.values()]


def shown_ratios(row: Line) -> list[str]:
    """Return the median and the quartiles of each ratio."""
    return [text for low, middle, high in row.ratios.values() for text in (f"{middle:.2f}", f"{low:.2f} to {high:.2f}")]


def copies_table(rows: Sequence[Line]) -> str:
    heads = [head for side in rows[0].ratios for head in (f"to {side}", "quartiles")]
    lines = [["copy", "page", "k", *rows[0].speeds, *heads]]
    for row in rows:
        place = [row.case, f"{row.size_bytes // 2**10} KiB", str(row.blocks_per_chunk)]
        lines.append([*place, *shown_speeds(row), *shown_ratios(row)])
    return markdown(lines)


def run_copies(
    name: str,
    doc: str | None,
    page_sizes: Sequence[int],
    measure: Callable[[int, int, int, int], list[Line]],
    software: Callable[[], str],
) -> None:
    """Run a benchmark of the tier's copies, in the venv of the engine tests.

    Args:
        name: The name of the script.
        doc: The docstring of the script.
        page_sizes: The bytes of a page, of each part of the run.
        measure: Returns the lines of a page size, a number of blocks in a chunk, a number of bytes and of rounds.
        software: Returns the software and the device that the figures depend on.
    """
    arguments = parser_of(doc, quick=True, result=True).parse_args()
    engine_venv.enter()
    size = QUICK_TRANSFER_BYTES if arguments.quick else TRANSFER_BYTES
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    result: Result[Line] = Result(name, arguments.quick, machine(), [], [])
    others = Others()
    for page_bytes in page_sizes:
        for blocks_per_chunk in BLOCKS_PER_CHUNK:
            progress(f"{name}: pages of {page_bytes} bytes, {blocks_per_chunk} blocks a chunk")
            result.rows += measure(page_bytes, blocks_per_chunk, size, rounds)
    result.notes += [f"{rounds} rounds of {size // 2**20} MiB a copy; {software()}", others.note()]
    finish(result, arguments.json, copies_table(result.rows))
