# SPDX-License-Identifier: Apache-2.0
"""A private store filled by real ingest: events on sockets, our router, Valkey."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import Publisher, child
from benchmarks.workload import WORKERS, Chain, Publishing, Workload, chains_for, write_frames

BLOCKS_PER_EVENT = 32
# The rate of 16 busy engines together; at full speed commits, and so log entries, would be larger than they are in
# service.
FILL_BLOCKS_S = 150_000


class Load(NamedTuple):
    """The events of a fleet, and the prompts that they announce."""

    # The file of frames.
    path: Path
    batches: int
    # The number of (worker, block) entries after all batches.
    entries: int
    # The last seq of each worker.
    last_seqs: list[int]
    chains: list[Chain]
    # The workers that hold each prompt, by its index in `chains`.
    held: dict[int, list[int]]


def make_load(folder: Path, entries: int) -> Load:
    chains = Workload().chains(chains_for(entries))
    publishing = Publishing()
    path = folder / "frames.bin"
    batches, _ = write_frames(path, publishing.frames(enumerate(chains), BLOCKS_PER_EVENT))
    return Load(path, batches, publishing.entries, [seq - 1 for seq in publishing.next_seqs], chains, publishing.held)


def fill_ours(folder: Path, load: Load) -> dict[str, Any]:
    """Fill a private store in folder/data by real ingest, and return the figures of `benchmarks.our_process fill`."""
    with Publisher.run(load.path, WORKERS) as publisher:
        command = [sys.executable, "-m", "benchmarks.our_process", "fill", str(folder / "data")]
        command += ["--endpoints", *publisher.endpoints, "--last-seqs", *map(str, load.last_seqs)]
        with child(command, folder / "fill.log", stdout=subprocess.PIPE) as process:
            answer(process, folder / "fill.log")
            publisher.wait()
            publisher.send(load.batches, FILL_BLOCKS_S)
            figures = answer(process, folder / "fill.log")
            process.wait(60)
    return figures


def answer(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"our process ended: {log.read_text()[-2000:]}")
    decoded: dict[str, Any] = json.loads(line)
    return decoded
