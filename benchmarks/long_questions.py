# SPDX-License-Identifier: Apache-2.0
"""How long a question about a long prompt holds up other questions.

Small questions are sent beside a client that queries a prompt of 10^6 token ids again and again. Four workers hold the
whole prompt, or only its first half.

    python -m benchmarks.long_questions [--tokens N] [--seconds S]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.http_client import HttpClient
from benchmarks.processes import Ours, Publisher
from benchmarks.report import Others, machine, markdown, parser_of, percentile, progress, scratch
from benchmarks.workload import BLOCK_TOKENS, MODEL, VOCABULARY, Chain, Frame, stored, write_frames
from kvrouter.events.vllm.codec import encode_batch
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_chain

WORKERS = 4
EVENT_BLOCKS = 512
SMALL_TOKENS = 512
HELD, HALF = "long, held by all", "long, half of it held"


def times(port: int, request: bytes, going: Callable[[], bool]) -> list[float]:
    """Send a request again and again while `going`, and return the sorted times of the answers in seconds."""
    client, taken = HttpClient(port), []
    while going():
        began = time.perf_counter()
        status, answer = client.send(request)
        taken.append(time.perf_counter() - began)
        if status != 200:
            raise RuntimeError(f"{status}: {answer[:300]!r}")
    client.close()
    return taken


def row(name: str, found: list[float]) -> list[str]:
    shares = [percentile(found, share) * 1e3 for share in (0.5, 0.99, 1.0)]
    return [name, f"{len(found):,}", *(f"{ms:.2f}" for ms in shares)]


def measure(folder: Path, num_tokens: int, seconds: float) -> list[list[str]]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, num_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    hashes, _ = hash_chain(HashScheme.default(), None, tokens, BLOCK_TOKENS, (None,))
    chain = Chain(0, tokens, hashes, hashes)
    frames = [
        Frame(
            worker,
            seq,
            EVENT_BLOCKS,
            encode_batch(1.7e9, [stored(chain, start, min(start + EVENT_BLOCKS, len(hashes)))], 0),
        )
        for worker in range(WORKERS)
        for seq, start in enumerate(range(0, len(hashes), EVENT_BLOCKS))
    ]
    write_frames(folder / "frames.bin", frames)
    rows = []
    with Publisher.run(folder / "frames.bin", WORKERS) as publisher, Ours.run(folder) as ours:
        ours.register(publisher.endpoints)
        publisher.wait()
        publisher.send(len(frames))
        client = HttpClient(ours.port)
        ids = tokens.tolist()
        unknown_ids = rng.integers(0, VOCABULARY, num_tokens // 2).tolist()
        long_requests, small = (
            {
                name: client.request("POST", "/query", {"model": MODEL, "token_ids": prompt_ids})
                for name, prompt_ids in ((HELD, ids), (HALF, ids[: num_tokens // 2] + unknown_ids))
            },
            client.request("POST", "/query", {"model": MODEL, "token_ids": ids[:SMALL_TOKENS]}),
        )
        while not _held(client, long_requests[HELD], len(tokens)):
            time.sleep(0.1)
        rows.append(row("small, alone", times(ours.port, small, _for(seconds))))
        for name, request in long_requests.items():
            progress(f"long questions: {name}")
            going = _for(seconds)
            with ThreadPoolExecutor(1) as beside:
                long_times = beside.submit(times, ours.port, request, going)
                rows.append(row(f"small, beside {name}", times(ours.port, small, going)))
                rows.append(row(name, long_times.result()))
        client.close()
    return rows


def _for(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until


def _held(client: HttpClient, request: bytes, num_tokens: int) -> bool:
    status, body = client.send(request)
    hits = msgspec.json.decode(body)["instances"] if status == 200 else {}
    return len(hits) == WORKERS and all(hit["longest_matched"] >= num_tokens - BLOCK_TOKENS for hit in hits.values())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the long prompt")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    arguments = parser.parse_args()
    about, others = machine(), Others()
    with scratch() as folder:
        rows = measure(folder, arguments.tokens, arguments.seconds)
    print(markdown([["question", "answers", "p50, ms", "p99, ms", "max, ms"], *rows]))
    print(f"- {others.note()}")
    print("- " + "; ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
