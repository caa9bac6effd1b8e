# SPDX-License-Identifier: Apache-2.0
"""`newest_probe.py MODEL FOLDER OUT`: our offload tiers under vLLM 0.33's scheduler, with the novelties of 0.33.

The novelties are notes of chunks that never came, loads that a step waits for, workers that are done with a reset, and
facts for the metrics. The script runs in its own process (`versions.run_under`), with a disk, aborted requests, and
resets.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from vllm.v1.kv_offload.base import Medium

from kvrouter.engine_patch.offload.manager import TAKES_METADATA_ONLY, TELLS_FLUSHES
from kvrouter.engine_patch.offload.spec import HybridOffloadingSpec
from tests.engine.group_sets import OFFLOAD_SETS
from tests.engine.offload_engine import SPEC
from tests.engine.oracle import Oracle
from tests.engine.workload import PromptTree

SEED = 11
STEPS = 400
# vLLM refuses a reset while a request waits for a load, which may be nearly always on a slow machine. The run goes on
# until it accepted one, for at most this many steps.
MOST_STEPS = 10 * STEPS
MAX_UNFINISHED = 5
ABORTED_SHARE, RESET_SHARE = 0.15, 0.02
# More than the probe ever writes.
DISK_BYTES = 1 << 22
SETTLE_STEPS = 60
LAYOUT = "cpu full+window, self-describing, 1 a chunk"


def run(model: Path, folder: Path, sync_bytes: int) -> dict[str, Any]:
    offload_set = next(candidate for candidate in OFFLOAD_SETS if candidate.name == LAYOUT)
    folder.mkdir()
    config = SPEC | offload_set.connector_config()
    config |= {"disk_path": str(folder / "disk"), "disk_bytes_to_use": DISK_BYTES, "shared_memory_path": str(folder)}
    config |= {"sync_load_budget_bytes": sync_bytes} if sync_bytes else {}
    rng = Random(SEED)
    oracle = Oracle(offload_set.group_set, model, rng, config)
    tree = PromptTree(rng, 512)
    offload: Any = oracle.scheduler.connector.connector_scheduler
    tracker, manager, tiers = offload._events_tracker, offload.manager, offload.manager._tiering
    steps = held_back = 0
    try:
        while steps < STEPS or (not held_back and steps < MOST_STEPS):
            steps += 1
            while oracle.unfinished < MAX_UNFINISHED and rng.random() < 0.7:
                oracle.submit(tree.request())
            if rng.random() < ABORTED_SHARE:
                oracle.abort_one()
            oracle.step(tree)
            if rng.random() < RESET_SHARE:
                # vLLM refuses a reset while a request waits for a load.
                with suppress(RuntimeError):
                    oracle.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                held_back += tiers._held
        for _ in range(SETTLE_STEPS):
            oracle.step()
            time.sleep(0.001)
        noted = {
            key
            for key, meta in tracker._pending_event_metadata.items()
            if (Medium.CPU, None) in meta.active_residencies
        }
        return {
            "features": [TAKES_METADATA_ONLY, TELLS_FLUSHES],
            "noted": len(noted),
            "noted_and_gone": sum(tiers._cpu.state(key).name == "ABSENT" for key in noted),
            "held_back": held_back,
            "holds_still": tiers._held,
            "promoted": tiers.counts.promoted,
            "resets": tiers.counts.resets,
            "waited": oracle._worker.waited,
            "facts": manager.config_info(),
            "labels": list(HybridOffloadingSpec.config_info_keys(config)),
        }
    finally:
        oracle.close()


def main() -> None:
    model, folder, out = map(Path, sys.argv[1:4])
    # With a budget, each step may wait for some chunks of these layouts.
    runs = {name: run(model, folder / name, size) for name, size in (("async", 0), ("sync", 1 << 16))}
    out.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
