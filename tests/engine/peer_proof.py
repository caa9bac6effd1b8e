# SPDX-License-Identifier: Apache-2.0
"""Real engines that fetch chunks from each other while all their tiers evict, and the claims about their answers.

Conversations move between the engines at random. Each answer is compared with that of an engine without any cache. In
some rounds, several prompts run at the same time in each engine; in the others, one does, and its reuse is compared with
the router's prediction.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.engine.engine_process import VOCAB_SIZE
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES, Work, alike, workload
from tests.engine.peer_predictor import PeerPredictor, Reuse
from tests.support.ports import free_port

ENGINES = 3
# Prompts that run at the same time in each engine, round by round. vLLM's CPU build answers a model with states otherwise
# if two prompts share a step, even without any cache (10 of 14 prompts).
AT_ONCE = {"windows": (1, 2), "states": (1,)}
# Two of the longest prompts with windows hold 2 * 94 blocks; in a smaller cache, vLLM may let two that are being loaded
# wait for each other for ever (`test_loads_wait.py`). One block is vLLM's own.
GPU_BLOCKS = {"windows": 189, "states": SHAPES["states"].gpu_blocks}
# The share of prompts that name no source.
ALONE = 0.1
# The share of the others that name the engine that ran their conversation last.
LIKELY = 0.8
# Tokens that distinguish conversations.
HEAD_TOKENS = 32
WARM_UP_TOKENS = 300
TIMEOUT_S = 2.0
# Reasons for which no chunk was to come; each other reason is a shortfall.
NO_SHORTFALL = "absent"
PREFIX = "vllm:kvrouter_offload_"
MISS = f"{PREFIX}peer_miss_"
# Wrong answers that are shown.
SHOWN = 4


class RandomSources:
    """Sources of prompts: often the engine that ran the conversation last, else any other one, or none."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last: dict[tuple[int, ...], int] = {}

    def source(self, engine: int, token_ids: Sequence[int]) -> int | None:
        """Return the number of the engine that lends to a prompt of another engine, or None."""
        head = tuple(token_ids[:HEAD_TOKENS])
        last = self._last.get(head)
        self._last[head] = engine
        if self._rng.random() < ALONE:
            return None
        if last is not None and last != engine and self._rng.random() < LIKELY:
            return last
        return self._rng.choice([number for number in range(ENGINES) if number != engine])


class Summary(msgspec.Struct):
    """The counts of a run."""

    shape: str
    prompts: int = 0
    wrong_answers: int = 0
    # Prompts with chunks of their source, and the tokens that prompts reused from any tier.
    prompts_with_fetched_chunks: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    fetched_chunks: int = 0
    # Chunks that a source held and that did not come, by reason, and their share.
    shortfall: dict[str, int] = {}
    shortfall_share: float = 0.0
    # Chunks that were to be fetched, did not come, and have no counted reason.
    uncounted: int = 0
    # Prompts whose reuse was predicted, and the tokens that were predicted from their engine's own tiers.
    predicted: int = 0
    local_tokens: int = 0
    # Prompts that reused less than was predicted from their engine's own tiers, or without a source more.
    over: int = 0
    under: int = 0
    # The tokens that were predicted from sources besides, and those that came.
    peer_tokens: int = 0
    came_tokens: int = 0
    # Prompts that reused less than was predicted with their source, and the chunks that the source held then and that did
    # not come, by reason.
    prompts_below: int = 0
    lost_chunks: dict[str, int] = {}
    # Prompts that reused more than was predicted with their source, because it got chunks meanwhile.
    prompts_above: int = 0
    # Prompts that reused less than was predicted with their source, although each of those chunks came.
    unexplained: int = 0
    evicted_chunks: list[int] = []
    # Pages that are on the GPU and in CPU memory, and those that differ.
    compared_pages: int = 0
    different_pages: int = 0
    # Engines whose announcements differ from what they hold.
    wrong_ledgers: int = 0
    # The longest call of each engine's scheduler, in which the tiers do their part of a step, without time without a core.
    slowest_call_s: list[float] = []
    examples: list[str] = []

    def note(self, example: str) -> None:
        """Keep the first examples of broken claims."""
        self.examples = [*self.examples, example][:SHOWN]

    @property
    def faults(self) -> int:
        """The number of broken claims."""
        return (
            self.wrong_answers
            + self.uncounted
            + self.over
            + self.under
            + self.unexplained
            + self.different_pages
            + self.wrong_ledgers
        )


def settings(shape: str, folder: Path, port: int, **more: Any) -> dict[str, Any]:
    """Return the settings of an engine that lends at a port."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "shared_memory_path": str(folder),
        "cpu_bytes_to_use": SHAPES[shape].cpu_blocks * SHAPES[shape].block_bytes,
        "peer_port": port,
        "peer_timeout_s": TIMEOUT_S,
        **more,
    }


def misses(engine: OffloadEngine) -> dict[str, int]:
    """Return the number of chunks that did not come, by reason."""
    counts = engine.do("counts")
    return {name.removeprefix(MISS): count for name, count in counts.items() if name.startswith(MISS) and count}


def request(work: Work, source: int | None, **more: Any) -> dict[str, Any]:
    """Return a request of `offload_child.Child.generate_all` that may load from all tiers."""
    return {"token_ids": work.token_ids, "max_tokens": work.max_tokens, "tiers": None, "source": source, **more}


@contextmanager
def without_cache(folder: Path, shape: str, model: Path) -> Iterator[OffloadEngine]:
    """Run an engine that reuses nothing; with states, one that reuses what is on the GPU.

    Without prefix caching, vLLM cuts the prompts of a model with states in other places, and some answers differ.
    """
    caches = shape == "states"
    with OffloadEngine(folder, model, GPU_BLOCKS[shape], None, patch=False, prefix_caching=caches) as engine:
        yield engine


@dataclass
class Proof:
    """A run of prompts on several engines."""

    shape: str
    model: Path
    folder: Path
    seed: int
    prompts: int
    progress: Callable[[str], None] = field(default=lambda line: None)

    def run(self) -> Summary:
        """Run the prompts, and return the counts."""
        rng = random.Random(f"{self.seed} sources")
        sources = RandomSources(rng)
        summary = Summary(self.shape)
        ports = [free_port() for _ in range(ENGINES)]
        with ExitStack() as stack:
            plain = stack.enter_context(without_cache(self.folder / "plain", self.shape, self.model))
            engines = [
                stack.enter_context(
                    OffloadEngine(
                        self.folder / f"engine{number}",
                        self.model,
                        GPU_BLOCKS[self.shape],
                        settings(self.shape, self.folder / f"slots{number}", port),
                    )
                )
                for number, port in enumerate(ports)
            ]
            for engine in (plain, *engines):
                # The first steps compile.
                engine.run(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(WARM_UP_TOKENS)), 2)
            for engine in engines:
                engine.do("take_slowest_s")
            works = list(workload(self.shape, self.seed, self.prompts))
            for at_once in itertools.cycle(AT_ONCE[self.shape]):
                if not works:
                    break
                batches = [[works.pop(0) for _ in range(min(at_once, len(works)))] for _ in engines]
                self._round(engines, plain, batches, ports, sources, summary)
                self.progress(
                    f"{self.shape}: {summary.prompts} of {self.prompts} prompts, {summary.wrong_answers} wrong, "
                    f"{summary.prompts_with_fetched_chunks} with fetched chunks"
                )
            self._finish(engines, summary)
        return summary

    def _round(
        self,
        engines: Sequence[OffloadEngine],
        plain: OffloadEngine,
        batches: Sequence[Sequence[Work]],
        ports: Sequence[int],
        sources: RandomSources,
        summary: Summary,
    ) -> None:
        """Run a batch in each engine at the same time."""
        chosen = [[sources.source(number, work.token_ids) for work in batch] for number, batch in enumerate(batches)]
        predictor = PeerPredictor(engines) if max(map(len, batches)) == 1 else None
        predicted = [
            [
                None if predictor is None else predictor.reuse(number, work.token_ids, source)
                for work, source in zip(batch, batch_sources, strict=True)
            ]
            for number, (batch, batch_sources) in enumerate(zip(batches, chosen, strict=True))
        ]
        for engine, batch, batch_sources in zip(engines, batches, chosen, strict=True):
            engine.begin(
                [
                    request(work, None if source is None else ports[source], hinted=summary.prompts % 2 == 1)
                    for work, source in zip(batch, batch_sources, strict=True)
                ]
            )
        truths = iter([plain.run(work.token_ids, work.max_tokens) for batch in batches for work in batch])
        for engine, batch, batch_sources, reuses in zip(engines, batches, chosen, predicted, strict=True):
            for work, source, reuse, answer in zip(batch, batch_sources, reuses, engine.answers(), strict=True):
                summary.prompts += 1
                summary.prompt_tokens += len(work.token_ids)
                summary.reused_tokens += answer["cached"]
                summary.prompts_with_fetched_chunks += answer["fetched"] > 0
                summary.uncounted += answer["uncounted"]
                if not alike(answer, truth := next(truths)):
                    summary.wrong_answers += 1
                    summary.note(f"source {source}: {answer} {truth}")
                if reuse is not None:
                    self._compare(reuse, source, answer, summary)

    def _compare(self, reuse: Reuse, source: int | None, answer: dict[str, Any], summary: Summary) -> None:
        """Compare what a prompt reused with the prediction."""
        cached = answer["cached"]
        summary.predicted += 1
        summary.local_tokens += reuse.local_tokens
        summary.peer_tokens += reuse.tokens - reuse.local_tokens
        summary.came_tokens += max(min(cached, reuse.tokens) - reuse.local_tokens, 0)
        over, under = cached < reuse.local_tokens, source is None and cached > reuse.local_tokens
        summary.over += over
        summary.under += under
        # The source may store and evict chunks before it is queried, because its own prompt has begun, too.
        lost = Counter(reason for place, key, reason in answer["unmet"] if (place, key) in reuse.lendable)
        summary.lost_chunks = dict(Counter(summary.lost_chunks) + lost)
        below = not over and cached < reuse.tokens
        summary.prompts_below += below
        summary.prompts_above += source is not None and cached > reuse.tokens
        unexplained = below and not lost
        summary.unexplained += unexplained
        if over or under or unexplained:
            summary.note(f"source {source}: {reuse}, {answer}")

    def _finish(self, engines: Sequence[OffloadEngine], summary: Summary) -> None:
        shortfall: Counter[str] = Counter()
        for engine in engines:
            shortfall.update(misses(engine))
            summary.fetched_chunks += engine.do("counts")[f"{PREFIX}peer_pulled"]
            summary.evicted_chunks.append(engine.do("evicted"))
            summary.slowest_call_s.append(engine.do("take_slowest_s"))
            pages = engine.do("same_bytes")
            summary.compared_pages += pages["compared"]
            summary.different_pages += pages["different"]
            summary.wrong_ledgers += engine.do("ledger") != engine.do("resident")
        del shortfall[NO_SHORTFALL]
        summary.shortfall = dict(shortfall)
        missed = shortfall.total()
        summary.shortfall_share = missed / max(1, missed + summary.fetched_chunks)
