# SPDX-License-Identifier: Apache-2.0
"""Claim: a step of vLLM's scheduler costs as much with 100,000 offloaded chunks in our CPU tier as with none.

Three engines get the same requests and take turns, block by block of steps: ours with an empty tier, ours with a full
tier, where each store evicts, and vLLM's own tier, full as well. A step is `add_request`, `schedule` and
`update_from_output` in the engine's thread. The script runs in the venv of the engine tests, which it enters by itself,
and builds when it is missing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import engine_venv
from benchmarks.patch_comparison import Comparison, compared, table
from benchmarks.report import Others, Result, finish, machine, parser_of, progress

CASE = "cpu 3-way, placeholder, 1 a chunk"
CHUNKS = 100_000
# vLLM rounds a chunk's bytes up to a page, and so do we; these layouts' chunks are smaller than one.
SLOT_BYTES = 4_096
BATCH_CHUNKS = 500
BLOCK_STEPS = 200
OURS = {"spec_name": "HybridOffloadingSpec", "spec_module_path": "kvrouter.engine_patch.offload.spec"}


def strangers(count: int) -> list[bytes]:
    """Return the keys of chunks that no prompt needs."""
    rng = Random(0)
    return [rng.randbytes(32) + bytes(4) for _ in range(count)]


def fill(manager: Any, chunks: int) -> None:
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(req_id="filling")
    manager.on_new_request(context)
    keys = strangers(chunks)
    for start in range(0, chunks, BATCH_CHUNKS):
        batch = keys[start : start + BATCH_CHUNKS]
        stored = manager.prepare_store(batch, context)
        assert stored is not None and len(stored.keys_to_store) == len(batch)
        manager.complete_store(batch, context)
    manager.on_request_finished(context)
    # Drop the events of the stored chunks, as nothing reads them.
    list(manager.take_events())


def main() -> None:
    parser = parser_of(__doc__, quick=True, result=True)
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="in the full tiers (default: %(default)s)")
    arguments = parser.parse_args()
    engine_venv.enter()
    # vLLM and the helpers of the engine tests exist only in that venv.
    from benchmarks.patch_engines import Engine, Steps
    from tests.engine.engine_config import write_model

    chunks = 2_000 if arguments.quick else arguments.chunks
    rounds = 4 if arguments.quick else 40
    settings = {"cpu_bytes_to_use": chunks * SLOT_BYTES}
    others = Others()
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as name:
        model = write_model(Path(name) / "model")
        engines = {
            "empty": Engine(CASE, model, False, settings=OURS | settings),
            "full": Engine(CASE, model, False, settings=OURS | settings),
            "vllm": Engine(CASE, model, False, settings=settings),
        }
        for side in ("full", "vllm"):
            progress(f"offload_step: filling {side}")
            fill(engines[side].scheduler.connector.connector_scheduler.manager, chunks)
        taken: dict[str, list[Steps]] = {side: [] for side in engines}
        order = list(engines)
        for turn in range(rounds + 1):
            for side in order:
                steps = engines[side].block(BLOCK_STEPS)
                engines[side].rest()
                # The first block warms caches.
                if turn:
                    taken[side].append(steps)
            order.append(order.pop(0))
            progress(f"offload_step: {turn} of {rounds}")
        for engine in engines.values():
            engine.close()
    rows: list[Comparison] = []
    for what, without, with_ in (
        (f"{chunks:,} chunks against none", "empty", "full"),
        (f"ours against vLLM's own tier, {chunks:,} chunks in each", "vllm", "full"),
    ):
        pairs = [
            (without_steps, with_steps) for without_steps, with_steps in zip(taken[without], taken[with_], strict=True)
        ]
        rows.append(compared(f"{what}: step", "us", [a.wall_us for a, _ in pairs], [b.wall_us for _, b in pairs]))
        rows.append(compared("the same, CPU", "us", [a.cpu_us for a, _ in pairs], [b.cpu_us for _, b in pairs]))
    result = Result("offload_step", arguments.quick, machine(), rows, [others.note()])
    finish(result, arguments.json, table(rows))


if __name__ == "__main__":
    main()
