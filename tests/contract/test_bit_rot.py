# SPDX-License-Identifier: Apache-2.0
"""Flip one bit of Valkey's file of commands: either a state that was committed is loaded, or the value is refused.

A refusal names the value. The files are real files of a real Valkey, which reads them again after each flip.

    python -m tests.contract.test_bit_rot --flips 500 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreUnavailable
from kvrouter.router.index.store.commit import Commit
from kvrouter.router.index.store.store import IndexStore
from tests.contract.index_support import CPU, GPU, Residency, change, checkpoint, held, take
from tests.support.store_server import StoreServer

WORKER = WorkerKey("m", "w")
# Commands are written to the file at once, and its first part is not rewritten meanwhile.
OPTIONS = ("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")
COMMITS = 8
CHECKPOINT_AFTER = 4
FLIPS = 60

Copies = dict[tuple[Place, int], int]
# The blocks and their numbers of copies, after each commit.
History = dict[int, tuple[Residency, Copies]]


async def write_history(url: str) -> History:
    """Commit blocks and copies that come and go, with a checkpoint among them."""
    store = await IndexStore.open(url)
    history: History = {}
    lease = await take(store, WORKER, "me")
    assert lease is not None
    await store.open_epoch(WORKER, "e", lease, {"state": b"live"})
    blocks: Residency = {GPU: set(), CPU: set()}
    copies: Copies = {}
    history[-1] = ({}, {})
    for seq in range(COMMITS):
        added, removed = (100 * seq + 1, 100 * seq + 2, 100 * seq + 3), ((100 * seq - 99,) if seq else ())
        changes = [change(GPU, added, removed), change(CPU, added[:1])]
        blocks[GPU] = (blocks[GPU] | set(added)) - set(removed)
        blocks[CPU] = blocks[CPU] | set(added[:1])
        counts = [(GPU, added[1], 2)] + ([(GPU, 100 * seq - 98, 3)] if seq % 3 == 2 else [])
        copies |= {(place, block): count for place, block, count in counts}
        await store.commit(
            Commit(WORKER, "e", seq, seq, changes, counts, {"state": b"live", "fingerprint": b"7"}), lease
        )
        history[seq] = ({place: set(hashes) for place, hashes in blocks.items()}, dict(copies))
        if seq == CHECKPOINT_AFTER:
            await store.checkpoint(checkpoint(WORKER, "e", seq, blocks), lease)
    await store.close()
    return history


async def judge(url: str, history: History) -> str:
    """Return the outcome of a flip: refused, or the commit that is loaded. Raises AssertionError for anything else."""
    try:
        store = await IndexStore.open(url)
    except StoreUnavailable:
        # The server answered while it was still reading its file.
        return "the server refuses its file"
    try:
        image = await store.load(WORKER)
        copies = await store.load_copies(WORKER)
    except StoredValueError as error:
        return f"refused: {error.field or error.key.rpartition(':')[2]}"
    finally:
        await store.close()
    if image.epoch is None:
        assert not held(image.places)
        return "nothing is there"
    assert image.epoch == "e"
    blocks, counts = history[-1 if image.seq is None else image.seq]
    assert held(image.places) == {place: hashes for place, hashes in blocks.items() if hashes}, "other blocks"
    # One copy too few only loses credit, but one too many would outlive its block.
    assert all(counts.get(name, 1) >= count for name, count in copies.items()), "more copies"
    return "as committed" if image.seq == COMMITS - 1 else "as of an earlier commit"


def flips(data: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    for _ in range(count):
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        yield bytes(damaged)


def run(folder: Path, count: int, seed: int) -> Counter[str]:
    """Flip `count` bits, each in the undamaged file, and return the outcomes."""
    with StoreServer(folder / "first", *OPTIONS) as server:
        history = asyncio.run(write_history(server.url))
    (commands,) = (folder / "first" / "appendonlydir").glob("*.incr.aof")
    ends: Counter[str] = Counter()
    for number, damaged in enumerate(flips(commands.read_bytes(), count, random.Random(seed))):
        copy = folder / str(number)
        shutil.copytree(folder / "first", copy)
        (copy / "appendonlydir" / commands.name).write_bytes(damaged)
        server = StoreServer(copy, *OPTIONS)
        try:
            server.start()
        except AssertionError:
            ends["the server refuses its file"] += 1
        else:
            ends[asyncio.run(judge(server.url, history))] += 1
        finally:
            server.__exit__()
        shutil.rmtree(copy)
    return ends


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    ends = run(tmp_path, FLIPS, seed=1)
    assert any(end.startswith("refused") for end in ends) and ends["as committed"], ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=FLIPS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for end, count in run(Path(name), arguments.flips, arguments.seed).most_common():
            print(f"{count:6} {end}")


if __name__ == "__main__":
    main()
