# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server reuses exactly the tokens that the router predicts, prompt after prompt, under eviction.

It is queried directly and through the router's proxy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.sglang.sglang_server import MODEL, WINDOW_TOKENS, SglangServer, post
from tests.support.router_process import RouterProcess
from tests.support.tiny_tokenizer import VOCAB_SIZE

# Prompts of each server.
PROMPTS = int(os.environ.get("KVROUTER_TEST_SGLANG_PROMPTS", "100"))
WORKER = "w"
LONGEST_TOKENS = 700
# Below this share the run would prove little.
MIN_HITS = 0.25
FULL = {"group_idx": 0, "kind": "full_attention", "block_size": 16, "spec_class": 0}
WINDOW = {
    "group_idx": 1,
    "kind": "sliding_window",
    "block_size": 16,
    "sliding_window": WINDOW_TOKENS,
    "spec_class": 1,
}
STATE = {"group_idx": 2, "kind": "mamba", "block_size": 1, "spec_class": 1}
GROUPS = {"full attention": [FULL], "windows": [FULL, WINDOW], "states": [FULL | {"block_size": 1}, STATE]}


@pytest.fixture(params=list(GROUPS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(tmp_path: Path, kind: str) -> Iterator[SglangServer]:
    with SglangServer(tmp_path, windows=kind == "windows", states=kind == "states") as started:
        yield started


def prompts(rng: Random) -> Iterator[list[int]]:
    """Yield prompts of conversations that grow, are repeated, cut short and branched: more than the cache keeps."""
    conversations: list[list[int]] = []
    for _ in range(PROMPTS):
        beginning = list(rng.choice(conversations[-10:])) if conversations and rng.random() < 0.8 else []
        if rng.random() < 0.5:
            beginning = beginning[: rng.randrange(len(beginning) + 1)]
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 120))]
        conversations.append((beginning + own)[:LONGEST_TOKENS])
        yield conversations[-1]


def test_every_prompt_is_predicted(server: SglangServer, kind: str, seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    wrong, hits = [], 0
    folder = tmp_path / "router"
    folder.mkdir()
    with RouterProcess(folder) as router:
        router.request(
            "POST",
            "/register",
            {"worker_id": WORKER, "model": MODEL, "url": server.url, "endpoint": server.endpoint},
        )
        row = router.wait_proven(WORKER)
        assert (row["engine"], row["catalog_source"]) == ("sglang", "declared")
        assert row["catalog"]["groups"] == GROUPS[kind]
        for number, token_ids in enumerate(prompts(rng)):
            # Wait twice, because the engine ends its step after it has answered.
            router.wait_proven(WORKER)
            row = router.wait_proven(WORKER)
            predicted = router.query(MODEL, WORKER, tuple(token_ids), None)["gpu"]
            if number % 2:
                reused = server.generate(token_ids, rng.randrange(1, 6))
            else:
                body = {"model": MODEL, "prompt": token_ids, "max_tokens": rng.randrange(1, 6), "ignore_eos": True}
                answer, headers = post(f"http://127.0.0.1:{router.port}/v1/completions", body)
                details = answer["usage"]["prompt_tokens_details"]
                reused = details["cached_tokens"] if details else 0
                assert headers["x-kvrouter-worker"] == WORKER
                assert int(headers["x-kvrouter-predicted-hit"]) == predicted
            hits += reused > 0
            if predicted != reused:
                wrong.append((len(token_ids), predicted, reused))
        assert row["patch"]["mismatches"] == 0
    assert not wrong, f"{len(wrong)} of {PROMPTS} wrong: {wrong[:5]}"
    print(f"{kind}: {PROMPTS} prompts, {hits} reuse")
    assert hits >= MIN_HITS * PROMPTS
