# SPDX-License-Identifier: Apache-2.0
"""A real engine that lends what only its disk holds: predicted, fetched and right, or a counted miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.engine_patch.offload.disk.format.folder import RECORDS_FILE
from tests.engine.engine_process import VOCAB_SIZE
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES, alike
from tests.engine.peer_predictor import PeerPredictor
from tests.engine.peer_proof import NO_SHORTFALL, PREFIX, misses, settings, without_cache
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

PROMPTS = 24
MIN_TOKENS, MAX_TOKENS = 100, 400
DISK_BLOCKS = 4_000
# The longest that the tier allows, so that a busy machine changes nothing.
TIMEOUT_S = 60.0


class Pair(NamedTuple):
    """A source whose disk holds prompts that its CPU tier has evicted, an engine that reads, and one without a cache."""

    source: OffloadEngine
    port: int
    reader: OffloadEngine
    plain: OffloadEngine
    prompts: list[tuple[int, ...]]

    def fetch(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        """Run a prompt that names the source, and check its answer."""
        answer = self.reader.run(prompt, 2, source=self.port)
        assert alike(answer, self.plain.run(prompt, 2))
        assert answer["uncounted"] == 0
        return answer

    def check(self) -> None:
        """Check that both engines have announced what they hold, and that equal chunks have equal bytes."""
        for engine in (self.source, self.reader):
            # An engine announces in its steps.
            engine.run(self.prompts[-1], 1)
            assert engine.do("ledger") == engine.do("resident")
            assert engine.do("same_bytes")["different"] == 0


@pytest.fixture(params=list(SHAPES))
def pair(
    request: pytest.FixtureRequest,
    models: Callable[[str], Path],
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pair]:
    # As between two machines.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    name, shape, rng = request.param, SHAPES[request.param], random.Random(f"{seed} lent disk")
    model, ports = models(shape.model), [free_port(), free_port()]
    disk = {
        "disk_path": str(tmp_path / "disk"),
        "disk_bytes_to_use": DISK_BLOCKS * shape.block_bytes,
        "peer_lends_disk": True,
    }
    with ExitStack() as stack:
        plain = stack.enter_context(without_cache(tmp_path / "plain", name, model))
        source, reader = (
            stack.enter_context(
                OffloadEngine(
                    tmp_path / f"engine{number}",
                    model,
                    shape.gpu_blocks,
                    settings(name, tmp_path / f"slots{number}", port, peer_timeout_s=TIMEOUT_S, **(disk, {})[number]),
                )
            )
            for number, port in enumerate(ports)
        )
        prompts = [
            tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(MIN_TOKENS, MAX_TOKENS)))
            for _ in range(PROMPTS)
        ]
        for prompt in prompts:
            source.run(prompt, 2)
        yield Pair(source, ports[0], reader, plain, prompts)


def test_what_only_the_disk_of_a_source_holds_is_fetched_as_predicted(pair: Pair) -> None:
    wrong: list[str] = []
    pulled_tokens = 0
    for prompt in pair.prompts:
        reuse = PeerPredictor([pair.source, pair.reader]).reuse(1, prompt, 0)
        answer = pair.fetch(prompt)
        pulled_tokens += reuse.tokens - reuse.local_tokens
        if answer["cached"] != reuse.tokens:
            wrong.append(f"{len(prompt)} tokens: {reuse.local_tokens} {reuse.tokens}, {answer}")
    counts, missed = pair.source.do("counts"), misses(pair.reader)
    assert not wrong, "\n".join(wrong)
    assert pulled_tokens > PROMPTS * MIN_TOKENS // 2
    assert not missed.keys() - {NO_SHORTFALL}, missed
    assert counts[f"{PREFIX}peer_lent_from_disk"] > PROMPTS, counts
    assert counts[f"{PREFIX}peer_disk_failed"] == counts[f"{PREFIX}peer_disk_late"] == 0
    pair.check()


def test_records_that_the_source_cannot_read_are_computed_and_counted(pair: Pair, tmp_path: Path) -> None:
    (records,) = (tmp_path / "disk").rglob(RECORDS_FILE)
    records.write_bytes(bytes(byte ^ 0xFF for byte in records.read_bytes()))
    before = pair.reader.do("counts")[f"{PREFIX}peer_pulled"]
    for prompt in pair.prompts[:4]:
        pair.fetch(prompt)
    counts, missed = pair.source.do("counts"), misses(pair.reader)
    assert missed.keys() - {NO_SHORTFALL} == {"disk"}, missed
    assert counts[f"{PREFIX}peer_disk_failed"] == missed["disk"] > 0
    assert counts[f"{PREFIX}disk_corrupt"] > 0
    assert pair.reader.do("counts")[f"{PREFIX}peer_pulled"] == before
    pair.check()
