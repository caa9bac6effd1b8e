# SPDX-License-Identifier: Apache-2.0
"""The hits that the router predicts with a source are what a real engine reuses that fetches from it.

Both engines' blocks are read from the objects that decide reuse, so this is about the declared catalog and the rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.events.patch.messages import DeclaredCatalog
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.lending_address import lending_address
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES, workload
from tests.engine.peer_proof import misses, settings
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

PROMPTS = 60
# The longest that the tier allows, so that a busy machine changes nothing.
TIMEOUT_S = 60.0
MIRROR_BYTES = 1 << 26


@pytest.fixture(autouse=True)
def transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have UCX use TCP, as between two machines."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def without_room(engine: OffloadEngine) -> int:
    """Return how many chunks the engine did not fetch so far because its CPU tier had no room for them."""
    return misses(engine).get("no_room", 0)


def hits(engines: list[OffloadEngine], token_ids: tuple[int, ...]) -> list[Hit]:
    """Return the router's hits for the blocks that the engines hold now, in the order of the engines."""
    mirror, views = Mirror(MIRROR_BYTES), []
    for number, engine in enumerate(engines):
        worker = WorkerKey("m", str(number))
        profile = WorkerProfile(Registration(worker, events=engine.endpoint), None)
        profile.declare(msgspec.convert(engine.do("declared"), DeclaredCatalog))
        mirror.begin_epoch(worker, "e")
        for place, hashes in engine.do("hashes").items():
            group, medium = place.removeprefix("g").split(":")
            mirror.add(worker, Place(int(group), medium), np.array(hashes, np.uint64))
        assert profile.declared_peer is not None
        peer = lending_address(profile.declared_peer, [engine.endpoint])
        scheme, catalog = profile.identity.scheme, profile.catalog
        views.append(WorkerView(worker, None, StreamState.LIVE, True, "", "e", catalog, scheme, {}, peer=peer))
    question = Question("m", len(token_ids), token_ids=np.array(token_ids))
    found = Matcher(mirror, SegmentMemory(0)).match(question, HashPlans.build(mirror, views))
    return sorted(found, key=lambda hit: hit.worker.worker_id)


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
            hit = hits(engines, work.token_ids)[other]
            pulls = [pull.tokens for pull in hit.pulls]
            answer = engines[other].run(work.token_ids, work.max_tokens, source=ports[first])
            fetched += bool(pulls)
            if answer["cached"] == max(pulls, default=hit.tokens):
                continue
            if without_room(engines[other]) > before and hit.tokens <= answer["cached"] < max(
                pulls, default=hit.tokens
            ):
                # The reader had no room for all chunks, and says so.
                conditional += 1
                continue
            wrong.append(f"prompt {number}, {len(work.token_ids)} tokens: {hit.by_tier} {pulls}, {answer['cached']}")
        assert engines[0].do("reset", connector=True)
        after = msgspec.convert(engines[0].do("declared"), DeclaredCatalog).peer
        text = [engine.log_tail() for engine in engines]
    assert not wrong, "\n".join(wrong)
    assert fetched > PROMPTS // 5 and conditional < fetched // 10, (fetched, conditional, text)
    assert None not in declared and {peer.exchange for peer in declared if peer} == {after.exchange if after else ""}
    assert [peer.port for peer in declared if peer] == ports and all(peer.token_bytes for peer in declared if peer)
    assert [peer.resets for peer in declared if peer] == [0, 0] and after is not None and after.resets == 1
