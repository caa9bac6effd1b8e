# SPDX-License-Identifier: Apache-2.0
"""Prompts that overfill every tier of an offloading engine, and the comparison of its answers with the router's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.engine.engine_process import VOCAB_SIZE
from tests.engine.offload_engine import OffloadEngine
from tests.support.examples import many
from tests.support.router_process import RouterProcess

MODEL = "tiny"
WORKER = "offloading"
# These fill and evict from every tier, and each test counts that they did. With 70, chunks of 4 blocks did too little.
PROMPTS = 300 if many() else 120
FEWER_PROMPTS = 100
# The tolerance for float32 sums in another order. A wrong page moves logits by whole numbers.
ROUNDING = 0.001


@dataclass(frozen=True)
class Shape:
    """A model, the bytes of a block over its layers, and the sizes of its tiers in blocks.

    Each tier is far smaller than the prompts need.
    """

    model: str
    block_bytes: int
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int


SHAPES = {
    # Keys and values of 32 tokens, one head of 64 numbers of 4 bytes.
    "windows": Shape("gemma3", 2 * 32 * 64 * 4, 110, 240, 700),
    # A block is as large as the model's largest state, and fewer blocks are worth keeping.
    "states": Shape("lfm2", 2 * 32 * 64 * 4, 90, 120, 300),
}


@dataclass(frozen=True)
class Case:
    shape: str
    count: int
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


# The prediction that a prompt is compared with, and the media that the prompt may load from (None: all).
TIERS: list[tuple[str, list[str] | None]] = [("gpu", []), ("cpu", ["CPU"]), ("disk", None), ("disk", None)]


@dataclass(frozen=True)
class Work:
    token_ids: tuple[int, ...]
    max_tokens: int
    # The field of the router's answer that is compared.
    predicted: str
    # The media that the engine may load from; None allows all of them.
    tiers: list[str] | None


def workload(shape: str, seed: int, prompts: int = PROMPTS) -> Iterator[Work]:
    """Yield prompts of conversations that grow, come back, are cut and branched: far more than all tiers hold."""
    rng = Random(f"{seed} {shape}")
    conversations = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(100, 500))) for _ in range(6)]
    for _ in range(prompts):
        token_ids = conversations[-rng.randint(1, min(len(conversations), rng.choice((3, 12, 40))))]
        kind = rng.random()
        if kind < 0.4:
            token_ids += tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(20, 200)))
        elif kind < 0.7:
            kept = token_ids[: rng.randint(len(token_ids) // 2, len(token_ids))]
            token_ids = (*kept, rng.randrange(3, VOCAB_SIZE))
        elif kind < 0.8:
            token_ids = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(200, 600)))
        token_ids = token_ids[:900]
        conversations.append(token_ids)
        yield Work(token_ids, rng.randint(1, 4), *rng.choice(TIERS))


def offload(case: Case, disk: Path) -> dict[str, Any]:
    """Return the connector's settings for tiers of the shape's numbers of blocks, whatever the size of a chunk."""
    shape = SHAPES[case.shape]
    chunk_bytes = shape.block_bytes * int(case.settings.get("blocks_per_chunk", 1))
    records = shape.disk_blocks * shape.block_bytes // chunk_bytes
    slots = disk.parent / "slots"
    slots.mkdir(exist_ok=True)
    return {
        "shared_memory_path": str(slots),
        "cpu_bytes_to_use": shape.cpu_blocks * shape.block_bytes,
        "disk_path": str(disk),
        # A record takes its chunk's bytes, which are whole pages here.
        "disk_bytes_to_use": records * chunk_bytes,
        **case.settings,
    }


def settled(router: RouterProcess, engine: OffloadEngine) -> dict[str, Any]:
    """Return the worker's row once a heartbeat has proven that the router holds the blocks of the engine's ledger.

    The router's answers show these blocks then.
    """
    blocks = {place: count for place, (count, _) in engine.do("ledger").items()}
    last_seq = engine.do("last_seq")

    def same(row: dict[str, Any]) -> bool:
        return row["seq"] == last_seq and {place: n for place, n in row["residency"].items() if n} == blocks

    return router.wait_proven(WORKER, same)


def alike(answer: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Return whether two answers have the same tokens, and the same logprobs except for rounding.

    Rounding differs because the cached tokens decide how a prefill is cut into pieces.
    """
    if answer["token_ids"] != truth["token_ids"]:
        return False
    for ours, theirs in zip(answer["logprobs"], truth["logprobs"], strict=True):
        expected = dict(map(tuple, theirs))
        shared = [(logprob, expected[token]) for token, logprob in ours if token in expected]
        # The last of the likeliest tokens may have changed places with one that is not listed.
        if len(shared) < len(ours) - 1 or any(abs(a - b) > ROUNDING for a, b in shared):
            return False
    return True


class Run:
    """A run of prompts, each of which is sent to the router first and then to the engine."""

    def __init__(self, router: RouterProcess, engine: OffloadEngine) -> None:
        self._router, self._engine = router, engine
        self.wrong: list[str] = []
        self.other: list[str] = []
        self.exact = 0
        self.asked = dict.fromkeys(("gpu", "cpu", "disk"), 0)
        self.hits = dict.fromkeys(self.asked, 0)
        self.beyond = {"cpu": 0, "disk": 0}

    def ask(self, number: int, work: Work, truth: dict[str, Any]) -> None:
        """Compare the router's prediction with the engine's reuse, and the engine's answer with `truth`.

        `truth` is the answer of an engine without offloading.
        """
        settled(self._router, self._engine)
        hits = self._router.query(MODEL, WORKER, work.token_ids, None)
        answer = self._engine.run(work.token_ids, work.max_tokens, work.tiers)
        self.asked[work.predicted] += 1
        self.hits[work.predicted] += answer["cached"] > 0
        self.beyond["cpu"] += hits["cpu"] > hits["gpu"]
        self.beyond["disk"] += hits["disk"] > hits["cpu"]
        summary = f"prompt {number}, {len(work.token_ids)} tokens, {work.predicted}: {hits}, reused {answer['cached']}"
        if answer["cached"] != hits[work.predicted]:
            self.wrong.append(summary)
        self.exact += answer["logprobs"] == truth["logprobs"]
        if not alike(answer, truth):
            self.other.append(f"{summary}\n  {answer}\n  {truth}")

    def row(self, name: str, pages: int) -> tuple[str, ...]:
        total = sum(self.asked.values())
        return (
            name,
            str(total),
            str(total - len(self.wrong)),
            f"{total - len(self.other)}, {self.exact} exactly",
            *(f"{self.hits[tier]}/{self.asked[tier]}" for tier in self.asked),
            str(self.beyond["cpu"]),
            str(self.beyond["disk"]),
            str(pages),
        )


HEADINGS = (
    "model, tiers",
    "prompts",
    "predicted",
    "same logprobs",
    "gpu hits",
    "cpu hits",
    "disk hits",
    "cpu > gpu",
    "disk > cpu",
    "same pages",
)
