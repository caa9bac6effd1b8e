# SPDX-License-Identifier: Apache-2.0
"""The throughput of a pull by the peer tier over loopback, beside a plain NIXL transfer of the same bytes.

Both are between the same two processes and the same memory. A plain transfer is one batch of all chunks, polled without
a pause. A pull has everything: loans, checksums of both sides, pieces and the end of the loans. The source remembers the
checksums of chunks that it lent before; with --first it forgets them before each pull. Pairs of one and the other follow
each other, and the ratio is the median over the pairs, because other programs use the cores, too.

    python -m benchmarks.peer_throughput --transports tcp,self --rounds 7
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.engine_venv import enter

MIB = 1 << 20
CHUNK_BYTES = (64 << 10, MIB, 4 * MIB, 16 * MIB)
# A prompt of 4,096 tokens with 128 KiB each, as of a model of 8 billion parameters.
PULL_MIB = 512
GOAL = 0.8
GOAL_BYTES = MIB
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
POLL_S = 0.0001


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="tcp,self", help="UCX_TLS of both processes; sm is shared memory")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk-bytes", type=int, action="append", help="default: 64 KiB, 1, 4 and 16 MiB")
    parser.add_argument("--pull-mib", type=int, default=PULL_MIB, help="MiB of one pull")
    parser.add_argument("--first", action="store_true", help="each pull is the first one of its chunks")
    parser.add_argument("--checksum", help="xxh3_64 or crc32; default: the best one here")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    os.environ["UCX_TLS"] = arguments.transports
    enter(nixl=True)
    if arguments.source is not None:
        lend(*json.loads(arguments.source))
        return 0
    rows = [measure(size, arguments) for size in arguments.chunk_bytes or CHUNK_BYTES]
    print(json.dumps(rows, indent=2))
    return int(any(row["ratio"] < GOAL for row in rows if row["chunk_bytes"] >= GOAL_BYTES))


class Side:
    """The slots of one process, with their tiers and threads."""

    def __init__(self, num_slots: int, chunk_bytes: int, port: int, algorithm: str) -> None:
        import numpy as np

        from kvrouter.engine_patch.offload.peer.lender import PeerFacts
        from kvrouter.engine_patch.offload.peer.peering import Peering, Slots
        from kvrouter.engine_patch.offload.tiers.cpu_tier import CpuTier
        from kvrouter.engine_patch.offload.tiers.lru import LruPolicy
        from kvrouter.engine_patch.offload.tiers.tiering import Tiering

        self.memory = np.zeros((num_slots, chunk_bytes), np.uint8)
        self.base = int(self.memory.ctypes.data)
        slots = Slots(
            self.base, num_slots, chunk_bytes, chunk_bytes, lambda number: memoryview(self.memory[number].data)
        )
        self.cpu = CpuTier(num_slots, LruPolicy(num_slots))
        self.tiers = Tiering(self.cpu, None)
        log = logging.getLogger("peer_throughput")
        self.peering = Peering(slots, lambda: PeerFacts(b"model", b"0"), algorithm, HOST, port, None, None, log)
        self.plane: Any = self.peering.client._plane
        self.peering.lend(self.tiers)

    def close(self) -> None:
        self.peering.client.close()
        self.peering.stop_lending()


def keys_of(count: int) -> list[Any]:
    from kvrouter.engine_patch.offload.key import pack

    return [pack(number.to_bytes(32, "big"), 0) for number in range(count)]


def lend(count: int, chunk_bytes: int, port: int, algorithm: str) -> None:
    """Lend chunks until the input ends; each line of it lets the source forget its checksums."""
    # A quarter of the slots may be lent at once. The others are never touched.
    side = Side(4 * count, chunk_bytes, port, algorithm)
    begun = side.tiers.begin_store(keys_of(count))
    assert begun is not None
    for number, slot in enumerate(begun[1]):
        side.memory[slot] = number % 251
    side.tiers.end_store(begun[0], True)
    print(json.dumps({"metadata": side.plane.metadata.hex(), "base": side.base, "slots": begun[1]}), flush=True)
    for _ in sys.stdin:
        with side.tiers.lock:
            side.cpu.checksums.clear()
        print(flush=True)
    side.close()


def measure(chunk_bytes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from kvrouter.engine_patch.offload.disk.format.checksum import default_checksum
    from tests.support.ports import free_port

    count, port = arguments.pull_mib * MIB // chunk_bytes, free_port()
    algorithm = arguments.checksum or default_checksum()
    command = [sys.executable, "-m", "benchmarks.peer_throughput", "--transports", arguments.transports]
    source = subprocess.Popen(
        [*command, "--source", json.dumps([count, chunk_bytes, port, algorithm])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert source.stdin is not None and source.stdout is not None
    try:
        return _pairs(chunk_bytes, count, port, algorithm, arguments, source)
    finally:
        source.stdin.close()
        source.wait()


def _pairs(
    chunk_bytes: int,
    count: int,
    port: int,
    algorithm: str,
    arguments: argparse.Namespace,
    source: subprocess.Popen[str],
) -> dict[str, Any]:
    from tests.support.ports import free_port

    assert source.stdin is not None and source.stdout is not None
    reader = Side(count, chunk_bytes, free_port(), algorithm)
    plain = Side(count, chunk_bytes, free_port(), algorithm)
    for side in (reader, plain):
        side.memory += 1
    # NIXL writes its log to the same output.
    given = json.loads(next(line for line in source.stdout if line.startswith("{")))
    keys = keys_of(count)
    name = plain.plane.add_peer(bytes.fromhex(given["metadata"]))
    rounds: list[tuple[float, float]] = []
    # The first pair opens the connections.
    for number in range(arguments.rounds + 1):
        if arguments.first:
            print(file=source.stdin, flush=True)
            source.stdout.readline()
        took_s = _transfer(plain, name, given, chunk_bytes, count), _pull(reader, keys, port, number)
        if number:
            rounds.append(took_s)
    assert bool((reader.memory == plain.memory).all())
    size_gb = count * chunk_bytes / 1e9
    reader.close()
    plain.close()
    return {
        "chunk_bytes": chunk_bytes,
        "transports": arguments.transports,
        "checksum": algorithm,
        "pull_mib": arguments.pull_mib,
        "first": arguments.first,
        "plain_gb_per_s": round(size_gb / statistics.median(pair[0] for pair in rounds), 3),
        "pull_gb_per_s": round(size_gb / statistics.median(pair[1] for pair in rounds), 3),
        "ratio": round(statistics.median(pair[0] / pair[1] for pair in rounds), 3),
        # The best of each, which other programs disturb least.
        "best_plain_gb_per_s": round(size_gb / min(pair[0] for pair in rounds), 3),
        "best_pull_gb_per_s": round(size_gb / min(pair[1] for pair in rounds), 3),
        "ratios": [round(pair[0] / pair[1], 2) for pair in rounds],
        "load": round(os.getloadavg()[0], 1),
    }


def _transfer(side: Side, name: str, given: dict[str, Any], chunk_bytes: int, count: int) -> float:
    from kvrouter.engine_patch.offload.peer.data_plane import Copy

    copies = [
        Copy(given["base"] + slot * chunk_bytes, side.base + number * chunk_bytes, chunk_bytes)
        for number, slot in enumerate(given["slots"])
    ]
    assert len(copies) == count
    began_s = time.monotonic()
    transfer = side.plane.read(name, copies)
    while not side.plane.is_done(transfer):
        pass
    took_s = time.monotonic() - began_s
    side.plane.release(transfer)
    return took_s


def _pull(side: Side, keys: list[Any], port: int, number: int) -> float:
    from kvrouter.engine_patch.offload.peer.peer_link import PullJob
    from kvrouter.engine_patch.offload.peer.peer_source import PeerSource

    job = PullJob(number, keys, list(range(len(keys))), 0, time.monotonic() + TIMEOUT_S)
    began_s = time.monotonic()
    side.peering.client.submit(PeerSource(HOST, port), job)
    left = len(keys)
    while left:
        outcomes: list[Any] = side.peering.client.poll()
        assert all(outcome.miss is None for outcome in outcomes), outcomes[:2]
        left -= len(outcomes)
        time.sleep(POLL_S)
    return time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
