# SPDX-License-Identifier: Apache-2.0
"""A real engine beside sources that lie, hang, die or are of another kind: right answers, and a count of each reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.engine_patch.offload.peer.data_plane import NixlPlane
from kvrouter.engine_patch.offload.peer.peer_wire import Lent, Present, Welcome
from tests.engine.engine_process import VOCAB_SIZE
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES, Work, alike
from tests.engine.peer_proof import PREFIX, misses, request, settings, without_cache
from tests.support.peer_double import (
    DoubleMemory,
    Lie,
    PeerDouble,
    changed,
    instead,
    nearby,
    of_other_chunks,
    overwritten,
)
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

SHAPE = "windows"
TIMEOUT_S = 2.0
# A prompt has eight whole blocks.
PROMPT_TOKENS = 270
DOUBLE_SLOTS = 64

LIES: dict[str, tuple[Lie, str]] = {
    "a wrong checksum": (changed(Lent, checksums=lambda double, lent: [7] * len(lent.slots)), "checksum"),
    "another block's data": (changed(Lent, slots=nearby), "checksum"),
    "another block's data with its checksum": (changed(Lent, checksums=of_other_chunks), "checksum"),
    "a slot that was given to another block": (overwritten, "checksum"),
    "slots beyond its memory": (changed(Lent, slots=lambda double, lent: [1 << 40] * len(lent.slots)), "transfer"),
    "slots beyond all addresses": (changed(Lent, slots=lambda double, lent: [1 << 62] * len(lent.slots)), "transfer"),
    "fewer slots than keys": (changed(Lent, slots=[0]), "protocol"),
    "an unknown reason": (changed(Lent, slots=lambda double, lent: [-99] * len(lent.slots)), "protocol"),
    "all evicted meanwhile": (changed(Lent, slots=lambda double, lent: [-1] * len(lent.slots)), "evicted"),
    "a presence of another length": (changed(Present, held=b"\1"), "protocol"),
    "an address that is not its own": (changed(Welcome, base=4096), "transfer"),
    "an address below zero": (changed(Welcome, base=-1), "transfer"),
    "the end of all addresses": (changed(Welcome, base=(1 << 64) - 1), "transfer"),
    "slots that are too small": (changed(Welcome, slot_bytes=1), "protocol"),
    "slots of a huge size": (changed(Welcome, slot_bytes=1 << 63), "transfer"),
    "no metadata": (changed(Welcome, metadata=b""), "transfer"),
    "metadata that is noise": (changed(Welcome, metadata=random.Random(1).randbytes(700)), "transfer"),
    "noise in place of a welcome": (instead(Welcome, b"\xc1noise"), "protocol"),
    "noise in place of a loan": (instead(Lent, random.Random(2).randbytes(90)), "protocol"),
    "no welcome": (instead(Welcome, None), "deadline"),
    "no presence": (instead(Present, None), "deadline"),
    "no loan": (instead(Lent, None), "deadline"),
    # Last, because NIXL keeps the part of an agent's metadata that it could read.
    "metadata that is cut": (changed(Welcome, metadata=lambda double, welcome: welcome.metadata[:-40]), "transfer"),
}


class Prompts:
    """New prompts, each with its answer by an engine without any cache."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._rng = random.Random(5)

    def new(self) -> tuple[Work, Any]:
        token_ids = tuple(self._rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS))
        work = Work(token_ids, 3, "cpu", None)
        return work, self._engine.run(work.token_ids, work.max_tokens)


class Fleet(NamedTuple):
    source: OffloadEngine
    source_port: int
    reader: OffloadEngine
    prompts: Prompts
    memory: DoubleMemory
    start: Callable[..., OffloadEngine]


@pytest.fixture(scope="module")
def fleet(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model, folder, shape = models(SHAPES[SHAPE].model), tmp_path_factory.mktemp("faults"), SHAPES[SHAPE]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # As between two machines.
        patch.setenv("UCX_TLS", "tcp,self")
        plain = stack.enter_context(without_cache(folder / "plain", SHAPE, model))
        numbers = iter(range(100))

        def start(port: int, offload: dict[str, Any] | None = None, **more: Any) -> OffloadEngine:
            name = f"{next(numbers)}"
            given = settings(SHAPE, folder / f"slots{name}", port) | (offload or {})
            return OffloadEngine(folder / name, model, shape.gpu_blocks, given, **more)

        port = free_port()
        source, reader = (stack.enter_context(start(number)) for number in (port, free_port()))
        facts = reader.do("peer_facts")
        memory = DoubleMemory(
            facts["chunk_bytes"], DOUBLE_SLOTS, lambda address, size: NixlPlane("double", address, size)
        )
        yield Fleet(source, port, reader, Prompts(plain), memory, start)


def growth(engine: OffloadEngine, before: dict[str, int]) -> dict[str, int]:
    return {
        reason: count - before.get(reason, 0) for reason, count in misses(engine).items() if count != before.get(reason)
    }


def fetch(reader: OffloadEngine, work: Work, source: int, **more: Any) -> dict[str, Any]:
    reader.begin([request(work, source, timeout_s=TIMEOUT_S, **more)])
    return reader.answers()[0]


def check_that_it_fetches(fleet: Fleet) -> None:
    """Check that the reader still fetches from an honest source, by either field of a request."""
    for hinted in (False, True):
        work, truth = fleet.prompts.new()
        fleet.source.run(work.token_ids, work.max_tokens)
        answer = fetch(fleet.reader, work, fleet.source_port, hinted=hinted)
        assert answer["fetched"] > 0 and answer["cached"] > 0, answer
        assert alike(answer, truth)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_costs_no_answer_and_is_counted(fleet: Fleet, name: str) -> None:
    lie, reason = LIES[name]
    work, truth = fleet.prompts.new()
    before = misses(fleet.reader)
    with PeerDouble(fleet.memory, free_port(), lie) as double:
        answer = fetch(fleet.reader, work, double.port)
        assert alike(answer, truth)
        assert answer["fetched"] == 0 and answer["uncounted"] == 0
        assert set(growth(fleet.reader, before)) == {reason}, double.messages
    assert fleet.reader.do("ledger") == fleet.reader.do("resident")


def test_the_engine_fetches_after_all_lies(fleet: Fleet) -> None:
    check_that_it_fetches(fleet)


def test_other_requests_end_while_one_waits_for_a_source_that_stands_still(fleet: Fleet) -> None:
    held, truth = fleet.prompts.new()
    fleet.source.run(held.token_ids, held.max_tokens)
    other, other_truth = fleet.prompts.new()
    before = misses(fleet.reader)
    fleet.source.pause()
    try:
        requests = [request(held, fleet.source_port, timeout_s=TIMEOUT_S), request(other, None)]
        fleet.reader.begin(requests)
        waited, passed = fleet.reader.answers()
    finally:
        fleet.source.resume()
    assert passed["place"] < waited["place"]
    assert alike(waited, truth) and alike(passed, other_truth)
    assert set(growth(fleet.reader, before)) == {"deadline"}


def test_a_source_that_dies_while_it_is_read_costs_no_answer(fleet: Fleet) -> None:
    port = free_port()
    with fleet.start(port) as source:
        works = [fleet.prompts.new() for _ in range(6)]
        for work, _ in works:
            source.run(work.token_ids, work.max_tokens)
        before = misses(fleet.reader)
        fleet.reader.begin([request(work, port, timeout_s=TIMEOUT_S) for work, _ in works])
        source.kill()
        answers = fleet.reader.answers()
    assert all(alike(answer, truth) for answer, (_, truth) in zip(answers, works, strict=True))
    assert sum(answer["uncounted"] for answer in answers) == 0
    assert set(growth(fleet.reader, before)) <= {"deadline", "gone", "transfer", "stalled", "absent", "evicted"}
    work, truth = fleet.prompts.new()
    assert alike(fetch(fleet.reader, work, port), truth)
    assert set(growth(fleet.reader, before)) & {"deadline", "gone"}
    assert fleet.reader.do("ledger") == fleet.reader.do("resident")


def test_a_source_of_another_block_size_lends_nothing(fleet: Fleet) -> None:
    port = free_port()
    with fleet.start(port, block_size=64) as source:
        work, truth = fleet.prompts.new()
        source.run(work.token_ids, work.max_tokens)
        before = misses(fleet.reader)
        assert alike(fetch(fleet.reader, work, port), truth)
        assert set(growth(fleet.reader, before)) == {"layout"}
        assert source.do("counts")[f"{PREFIX}peer_refused_readers"] > 0


def test_a_full_cpu_tier_here_costs_no_answer(fleet: Fleet) -> None:
    slots = 3
    with fleet.start(free_port(), {"cpu_bytes_to_use": slots * SHAPES[SHAPE].block_bytes}) as reader:
        work, truth = fleet.prompts.new()
        fleet.source.run(work.token_ids, work.max_tokens)
        assert alike(fetch(reader, work, fleet.source_port), truth)
        assert misses(reader).get("no_room", 0) > 0
        assert reader.do("ledger") == reader.do("resident")


def test_a_source_with_other_weights_lends_nothing_until_both_were_reset(fleet: Fleet) -> None:
    work, truth = fleet.prompts.new()
    assert fleet.source.do("reset", connector=True)
    fleet.source.run(work.token_ids, work.max_tokens)
    before = misses(fleet.reader)
    assert alike(fetch(fleet.reader, work, fleet.source_port), truth)
    assert set(growth(fleet.reader, before)) == {"resets"}
    assert fleet.reader.do("reset", connector=True)
    check_that_it_fetches(fleet)
