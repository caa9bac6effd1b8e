# SPDX-License-Identifier: Apache-2.0
"""The router predicts what a real SGLang server with a host tier (HiCache) reuses, prompt after prompt.

It also predicts which tokens are loaded back from the host, while the host evicts. Controller, tree, budgets and
load-backs are SGLang's; `stubs/hicache_on_cpu.py` replaces the parts of CUDA that they use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.sglang.sglang_server import MODEL, SglangServer
from tests.support.router_process import RouterProcess
from tests.support.tiny_tokenizer import VOCAB_SIZE

# Prompts of each server; 1,000 make 2,000 in all.
PROMPTS = int(os.environ.get("KVROUTER_TEST_SGLANG_HOST_PROMPTS", "120"))
WORKER = "w"
LONGEST_TOKENS = 700
# The latest prompts, which conversations are continued from: more than the device holds, and about as many as the host
# holds.
RECENT = 60
# Below these shares the run would prove little.
LEAST_HITS, LEAST_LOADED = 0.3, 0.04


@pytest.fixture(params=[False, True], ids=["full attention", "windows"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SglangServer]:
    with SglangServer(tmp_path, windows=request.param, has_host=True) as started:
        yield started


def prompts(rng: Random) -> Iterator[list[int]]:
    """Yield prompts of conversations that grow, are cut short and branched, some long after their last turn."""
    conversations: list[list[int]] = []
    for _ in range(PROMPTS):
        beginning = list(rng.choice(conversations[-RECENT:])) if conversations and rng.random() < 0.7 else []
        if rng.random() < 0.4:
            beginning = beginning[: rng.randrange(len(beginning) + 1)]
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 120))]
        conversations.append((beginning + own)[:LONGEST_TOKENS])
        yield conversations[-1]


def test_every_load_back_is_predicted(server: SglangServer, seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    wrong, hits, loaded, held, evicted = [], 0, 0, 0, 0
    folder = tmp_path / "router"
    folder.mkdir()
    with RouterProcess(folder) as router:
        router.request(
            "POST",
            "/register",
            {"worker_id": WORKER, "model": MODEL, "url": server.url, "endpoint": server.endpoint},
        )
        for token_ids in prompts(rng):
            # Wait twice, because the engine ends its step after it has answered.
            router.wait_proven(WORKER)
            row = router.wait_proven(WORKER)
            before, held = held, sum(n for place, n in row["residency"].items() if place.endswith(":CPU"))
            evicted += max(0, before - held)
            predicted = router.query(MODEL, WORKER, tuple(token_ids), None)
            reused = server.generate(token_ids, rng.randrange(1, 6))
            hits += reused > 0
            loaded += reused > predicted["gpu"]
            if predicted["cpu"] != reused:
                wrong.append((len(token_ids), predicted["gpu"], predicted["cpu"], reused))
        assert row["catalog"]["offload_connector"] == "HiCache"
        assert row["patch"]["mismatches"] == 0
    print(f"{PROMPTS} prompts, {hits} reuse, {loaded} of them loaded back, {evicted} pages fewer on the host")
    assert not wrong, f"{len(wrong)} of {PROMPTS} wrong: {wrong[:5]}"
    assert hits >= LEAST_HITS * PROMPTS and loaded >= LEAST_LOADED * PROMPTS and evicted
