# SPDX-License-Identifier: Apache-2.0
"""The cost of a flooding neighbour to a quiet worker: the lag of its batches, and the latency of a /query meanwhile.

The lag is the time from the worker's batch to the answer that shows it. The quiet worker publishes two blocks at a time
and queries them until they show; the neighbour, an engine of another model, publishes as fast as the router reads. The
script prints a table; `--json FILE` keeps every sample.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from benchmarks.processes import rss_bytes
from benchmarks.report import parser_of, percentile, scratch
from tests.support.fake_engine import FakeEngine, prompt, stored
from tests.support.flooding import begin, flood
from tests.support.router_process import RouterProcess

MODEL, NOISY = "quiet", "noisy"
# Block hashes in one batch of the flood; None for no flood. With fewer hashes a larger share of the cost is decoding,
# with more hashes it is the store and the mirror.
FLOODS = (None, 1, 100, 5_000)
WARM_UP_S = 2.0
PAUSE_S = 0.02


def sample(router: RouterProcess, quiet: FakeEngine, rounds: int, first: int) -> tuple[list[float], list[float]]:
    """Return the lags and the times of single questions, both in seconds."""
    lags, questions = [], []
    for number in range(rounds):
        tokens = prompt(first + number, 2)
        quiet.publish(stored(tokens, 0, 2))
        published_s = time.perf_counter()
        while True:
            query_began_s = time.perf_counter()
            answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})
            questions.append(time.perf_counter() - query_began_s)
            if answer["instances"]["quiet"]["gpu"] == 32:
                break
        lags.append(time.perf_counter() - published_s)
        time.sleep(PAUSE_S)
    return lags, questions


def measure(blocks: int | None, rounds: int, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> dict[str, Any]:
    with RouterProcess(folder) as router, ExitStack() as stack:
        quiet = FakeEngine(context)
        stack.callback(quiet.close)
        router.request("POST", "/register", quiet.registration("quiet", MODEL))
        router.wait_connected("quiet")
        sample(router, quiet, 20, 1)
        before_seq, began_s, flooded = 0, time.perf_counter(), 0.0
        if blocks is not None:
            port, flooder = stack.enter_context(flood(blocks))
            endpoint = f"tcp://127.0.0.1:{port}"
            noisy = {"worker_id": "noisy", "model": NOISY, "endpoint": endpoint, "patch_endpoint": "off"}
            router.request("POST", "/register", noisy)
            router.wait_connected("noisy")
            begin(flooder)
            time.sleep(WARM_UP_S)
            before_seq, began_s = router.worker("noisy")["seq"] or 0, time.perf_counter()
        lags, questions = sample(router, quiet, rounds, 1_000)
        if blocks is not None:
            flooded = ((router.worker("noisy")["seq"] or 0) - before_seq) / (time.perf_counter() - began_s)
        rss = rss_bytes(router.pid)
    return {"blocks": blocks, "lags_s": lags, "questions_s": questions, "flood_batches_s": flooded, "rss_bytes": rss}


def main() -> None:
    parser = parser_of(__doc__, result=True)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    results = []
    print("| neighbour | its batches/s | lag p50 | lag p99 | /query p50 | /query p99 | router's memory |")
    print("|---|---|---|---|---|---|---|")
    with zmq.Context[zmq.Socket[bytes]]() as context:
        for blocks in FLOODS:
            with scratch() as folder:
                measured = measure(blocks, arguments.rounds, context, folder)
            results.append(measured)
            lags, questions = measured["lags_s"], measured["questions_s"]
            name = "none" if blocks is None else f"floods, {blocks} block(s) a batch"
            cells = [name, f"{measured['flood_batches_s']:,.0f}"]
            cells += [
                f"{1000 * percentile(samples, share):.1f} ms" for samples in (lags, questions) for share in (0.5, 0.99)
            ]
            print("| " + " | ".join([*cells, f"{measured['rss_bytes'] >> 20} MB"]) + " |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
