# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine reuses exactly the tokens that the router predicts, prompt after prompt, under eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import zmq

pytest.importorskip("vllm")

from tests.engine.engine_process import VOCAB_SIZE, EngineProcess
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

PROMPTS = 80
MODEL = "gemma3-tiny"
WORKER = "real"
# Below these counts the run would prove little.
MIN_HITS = 15
MIN_MISLED = 5


@pytest.fixture(params=["0", "1"], ids=["stock", "with the patch"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path, free_port(), free_port(), {"KVROUTER_PATCH": request.param}) as process:
        yield process


def prompts(rng: Random) -> Iterator[tuple[tuple[int, ...], str | None]]:
    """Yield prompts of conversations that grow, are repeated, cut short and branched: more than the cache keeps."""
    roots: list[tuple[tuple[int, ...], str | None]] = [
        (tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(100, 500))), None) for _ in range(4)
    ]
    roots.append((roots[0][0], "tenant-a"))
    for _ in range(PROMPTS):
        # Recent conversations come back more often, so that some are still there and some are evicted in part.
        token_ids, salt = roots[-rng.randint(1, min(len(roots), rng.choice((2, 14))))]
        kind = rng.random()
        if kind < 0.45:
            token_ids += tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(20, 200)))
        elif kind < 0.75:
            kept = token_ids[: rng.randint(len(token_ids) // 2, len(token_ids))]
            token_ids = (*kept, rng.randrange(3, VOCAB_SIZE))
        elif kind < 0.85:
            token_ids = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(200, 600)))
        token_ids = token_ids[:900]
        roots.append((token_ids, salt))
        yield token_ids, salt


def test_a_real_engine_reuses_what_the_router_predicted(
    engine: EngineProcess,
    router: RouterProcess,
    seed: int,
    table: Callable[..., None],
    request: pytest.FixtureRequest,
) -> None:
    rng = Random(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    seq = -1
    wrong: list[str] = []
    hits = misled = reused = total = 0
    router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
    patched = request.node.callspec.params["engine"] == "1"
    try:
        (router.wait_proven if patched else router.wait_connected)(WORKER)
        assert (router.worker(WORKER)["patch"] is not None) is patched
        for number, (token_ids, salt) in enumerate(prompts(rng)):
            seq = engine.last_published(context, seq)
            if seq >= 0:
                router.wait_seen(WORKER, seq)
            prediction = router.query(MODEL, WORKER, token_ids, salt, explain=True)
            predicted = prediction["gpu"]
            answer = engine.generate(token_ids, rng.randint(1, 6), salt)
            if predicted != answer["cached"]:
                wrong.append(
                    f"seed {seed} prompt {number}, {len(token_ids)} tokens, salt {salt!r}, seq {seq}: "
                    f"predicted {predicted}, engine reused {answer['cached']}\n  {router.worker(WORKER)}"
                )
            hits += answer["cached"] > 0
            # The prediction of a router that looks at full attention alone, as most do.
            alone = [group["covered"] for group in prediction["groups"] if group["kind"] == "full_attention"]
            misled += max(alone, default=0) > answer["cached"]
            reused += answer["cached"]
            total += len(token_ids)
    finally:
        router.unregister(WORKER)
        context.destroy(linger=0)
    table(
        "Real engine (Gemma-3 shape, 5 sliding windows + 1 full attention, CPU)",
        ("engine", "prompts", "equal", "with a hit", "full attention alone too high", "tokens reused", "event batches"),
        (
            request.node.callspec.id,
            str(PROMPTS),
            str(PROMPTS - len(wrong)),
            str(hits),
            str(misled),
            f"{reused / total:.0%}",
            str(seq + 1),
        ),
    )
    assert not wrong, "\n".join(wrong[:5])
    assert hits >= MIN_HITS
    assert misled >= MIN_MISLED
