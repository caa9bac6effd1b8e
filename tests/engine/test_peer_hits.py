# SPDX-License-Identifier: Apache-2.0
"""The hits that the router predicts with a source are what a real engine reuses that fetches from it.

Both engines' blocks are read from the objects that decide reuse, so this is about the declared catalog and the rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.events.patch.messages import DeclaredCatalog
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES, workload
from tests.engine.peer_predictor import PeerPredictor
from tests.engine.peer_proof import misses, settings
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

PROMPTS = 60
# The longest that the tier allows, so that a busy machine changes nothing.
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have UCX use TCP, as between two machines."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def without_room(engine: OffloadEngine) -> int:
    """Return how many chunks the engine did not fetch so far because its CPU tier had no room for them."""
    return misses(engine).get("no_room", 0)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hit_with_a_source_is_what_an_engine_reuses_that_fetches(
    shape: str, chunk: int, models: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    model, blocks = models(SHAPES[shape].model), SHAPES[shape].gpu_blocks
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                OffloadEngine(
                    tmp_path / f"engine{n}",
                    model,
                    blocks,
                    settings(shape, tmp_path / f"slots{n}", port)
                    | {"blocks_per_chunk": chunk, "peer_timeout_s": TIMEOUT_S},
                )
            )
            for n, port in enumerate(ports)
        ]
        declared = [msgspec.convert(engine.do("declared"), DeclaredCatalog).peer for engine in engines]
        wrong: list[str] = []
        fetched = conditional = 0
        for number, work in enumerate(workload(shape, seed)):
            if number >= PROMPTS:
                break
            # Each prompt runs on one engine, and then on the other, which may fetch what it lacks.
            first = number % 2
            other = 1 - first
            engines[first].run(work.token_ids, work.max_tokens)
            before = without_room(engines[other])
            reuse = PeerPredictor(engines).reuse(other, work.token_ids, first)
            answer = engines[other].run(work.token_ids, work.max_tokens, source=ports[first])
            fetched += reuse.tokens > reuse.local_tokens
            if answer["cached"] == reuse.tokens:
                continue
            if without_room(engines[other]) > before and reuse.local_tokens <= answer["cached"] < reuse.tokens:
                # The reader had no room for all chunks, and says so.
                conditional += 1
                continue
            wrong.append(
                f"prompt {number}, {len(work.token_ids)} tokens: {reuse.local_tokens} {reuse.tokens}, {answer['cached']}"
            )
        assert engines[0].do("reset", connector=True)
        after = msgspec.convert(engines[0].do("declared"), DeclaredCatalog).peer
        text = [engine.log_tail() for engine in engines]
    assert not wrong, "\n".join(wrong)
    assert fetched > PROMPTS // 5 and conditional < fetched // 10, (fetched, conditional, text)
    assert None not in declared and {peer.exchange for peer in declared if peer} == {after.exchange if after else ""}
    assert [peer.port for peer in declared if peer] == ports and all(peer.token_bytes for peer in declared if peer)
    assert [peer.resets for peer in declared if peer] == [0, 0] and after is not None and after.resets == 1
