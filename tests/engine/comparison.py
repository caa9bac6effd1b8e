# SPDX-License-Identifier: Apache-2.0
"""A comparison of one engine's answers with the router's, question by question."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from tests.engine.oracle import Answer, Oracle
from tests.engine.workload import Prompt, PromptTree
from tests.support.router_process import RouterProcess

# Requests that wait or run at the same time. The engine runs fewer, so the queue is never empty.
MAX_UNFINISHED = 5
# Engine steps between two rounds of questions.
MAX_STEPS_A_ROUND = 4
ABORTED_SHARE = 0.03
RESET_SHARE = 0.12
# Steps after which every transfer has ended.
IDLE_STEPS = 8
# Reports that a failure shows in full.
SHOWN_MISMATCHES = 3


@dataclass
class Tally:
    """The counts of one comparison."""

    name: str
    # Questions that are compared exactly.
    probes: int = 0
    # Questions before a learned catalog was complete, when the router may predict less than the engine reuses.
    early: int = 0
    # Probes with a chunk in transfer, which are judged by the chunks that the tier already holds.
    in_transfer: int = 0
    # Probes with a chunk in transfer in which the engine does not wait for it, and reuses another number of tokens than
    # the tier already holds.
    cut_short: int = 0
    # Probes in which vLLM 0.32 loads chunks of chunked local attention from the CPU that do not begin where the
    # prompt's chunks do. The router promises none of these chunks.
    misplaced: int = 0
    clears: int = 0
    gpu_hits: int = 0
    external_hits: int = 0
    hit_tokens: int = 0
    steps: int = 0
    stored: int = 0
    evicted: int = 0
    cpu_stored: int = 0
    cpu_evicted: int = 0
    mismatches: list[str] = field(default_factory=list)

    HEADINGS = (
        "set",
        "probes",
        "early",
        "non-zero",
        "mean hit",
        "cpu beyond gpu",
        "in transfer",
        "cut short",
        "misplaced",
        "steps",
        "evicted",
        "cpu evicted",
    )

    def row(self) -> tuple[str, ...]:
        share = self.gpu_hits / max(1, self.probes + self.early)
        mean = self.hit_tokens / max(1, self.probes)
        return (
            self.name,
            str(self.probes),
            str(self.early),
            f"{share:.0%}",
            f"{mean:.0f}",
            str(self.external_hits),
            str(self.in_transfer),
            str(self.cut_short),
            str(self.misplaced),
            str(self.steps),
            str(self.evicted),
            str(self.cpu_evicted),
        )


class Comparison:
    """One worker of the router, fed by one oracle."""

    def __init__(self, router: RouterProcess, oracle: Oracle, rng: Random, seed: int, name: str) -> None:
        self._router = router
        self._oracle = oracle
        self._rng = rng
        self._seed = seed
        self._worker_id = self._model = name.replace(" ", "_")
        self._tree = PromptTree(rng, 512)
        self._whole = False
        self._never_whole = False
        self._resets = False
        self.tally = Tally(name)

    def run(
        self,
        catalog: dict[str, Any] | None,
        rounds: int,
        questions: int,
        *,
        never_whole: bool = False,
        patch: str | None = None,
        reported: Callable[[], int] | None = None,
        resets: bool = False,
    ) -> Tally:
        """Register the engine, let it work, and compare answers to random questions after each round.

        Args:
            catalog: The catalog to register, or None if the router has to learn it or the patch declares it.
            rounds: How many rounds of engine steps to run.
            questions: How many questions to compare after each round.
            never_whole: Whether the wire lacks a fact, so that answers may always fall short of the engine's, but never
                exceed them.
            patch: The endpoint at which the engine patch answers, which declares the catalog; None without the patch.
            reported: Returns the seq of the patch's last message, once all messages are sent.
            resets: Whether the caches of the GPU and of the connector are sometimes emptied, also while requests run.
                Without the patch, vLLM does not say which of them was emptied, so answers may fall short.
        """
        oracle, router = self._oracle, self._router
        self._never_whole = never_whole or (resets and patch is None)
        self._resets = resets
        self._whole = not self._never_whole and (catalog is not None or patch is not None)
        router.register(self._worker_id, self._model, oracle.endpoint, oracle.replay_endpoint, catalog, patch)
        try:
            if patch is None:
                router.wait_connected(self._worker_id)
            else:
                router.wait_proven(self._worker_id)
            for _ in range(rounds):
                if self._advance():
                    seq = oracle.last_seq if reported is None else reported()
                    self._learn(router.wait_seen(self._worker_id, seq))
                for _ in range(questions):
                    self._compare(self._tree.question())
        finally:
            router.unregister(self._worker_id)
        traffic = oracle.traffic
        self.tally.stored, self.tally.evicted = traffic.stored, traffic.removed
        self.tally.cpu_stored, self.tally.cpu_evicted = traffic.cpu_stored, traffic.cpu_removed
        self.tally.clears = traffic.clears
        return self.tally

    def _advance(self) -> bool:
        """Run a few engine steps under load, and return whether a batch was published."""
        published = False
        for _ in range(self._rng.randint(1, MAX_STEPS_A_ROUND)):
            while self._oracle.unfinished < MAX_UNFINISHED and self._rng.random() < 0.7:
                self._oracle.submit(self._tree.request())
            if self._rng.random() < ABORTED_SHARE:
                self._oracle.abort_one()
            published |= self._oracle.step(self._tree)
            self.tally.steps += 1
        if self._resets and self._rng.random() < RESET_SHARE:
            self._reset()
            published = True
        return published

    def _reset(self) -> None:
        if self._rng.random() < 0.6:
            # Finish all requests and transfers, so that the reset is not refused.
            while self._oracle.unfinished:
                self._oracle.step(self._tree)
            for _ in range(IDLE_STEPS):
                self._oracle.step(self._tree)
        # vLLM refuses a reset while a request waits for a load, after it has preempted the running requests.
        with suppress(RuntimeError):
            self._oracle.reset(running=self._rng.random() < 0.5, connector=self._rng.random() < 0.6)
        # vLLM sends its own clear with the next step that publishes, and a new prompt causes such a step.
        self._oracle.submit(Prompt(tuple(self._rng.randrange(512) for _ in range(64))))
        while not self._oracle.step(self._tree):
            self.tally.steps += 1

    def _learn(self, row: dict[str, Any]) -> None:
        """Note whether the router knows all groups by now; it cannot know a group that has had no events."""
        groups = (row["catalog"] or {}).get("groups", [])
        knows_all = len(groups) == len(self._oracle.group_set.specs)
        self._whole = self._whole or (knows_all and not self._never_whole)

    def _compare(self, prompt: Prompt) -> None:
        truth = self._oracle.ask(prompt)
        hits = self._router.query(self._model, self._worker_id, prompt.token_ids, prompt.cache_salt)
        tally = self.tally
        if not self._whole:
            tally.early += 1
            tally.gpu_hits += hits["gpu"] > 0
            if hits["gpu"] > truth.gpu or hits["cpu"] > truth.cpu:
                self._report("more than the engine gives, before the catalog is whole", prompt, truth)
            return
        tally.probes += 1
        tally.gpu_hits += truth.gpu > 0
        tally.hit_tokens += truth.gpu
        if hits["gpu"] != truth.gpu:
            self._report("gpu", prompt, truth)
            return
        tally.in_transfer += truth.transfer
        tally.cut_short += truth.now is not None and truth.now != truth.cpu
        tally.external_hits += truth.cpu > truth.gpu
        if hits["cpu"] < truth.cpu and self._is_misplaced(truth):
            tally.misplaced += 1
        elif hits["cpu"] != truth.cpu:
            self._report("cpu", prompt, truth)

    def _is_misplaced(self, truth: Answer) -> bool:
        specs = self._oracle.group_set.specs
        chunks = [spec.attention_chunk_size for spec in specs if isinstance(spec, ChunkedLocalAttentionSpec)]
        return self._oracle.is_simple and any(truth.gpu % chunk for chunk in chunks)

    def _report(self, what: str, prompt: Prompt, truth: Answer) -> None:
        """Record a mismatch with everything needed to repeat it and to find the group that caused it."""
        hits = self._router.query(self._model, self._worker_id, prompt.token_ids, prompt.cache_salt, explain=True)
        row = self._router.worker(self._worker_id)
        self.tally.mismatches.append(
            f"{self.tally.name}: {what}: engine {truth}, router gpu={hits['gpu']} cpu={hits['cpu']}\n"
            f"  seed {self._seed} step {self.tally.steps} seq {self._oracle.last_seq} "
            f"question {self.tally.probes + self.tally.early} "
            f"prompt {len(prompt.token_ids)} tokens, salt {prompt.cache_salt!r}\n"
            f"  engine's blocks:\n{self._oracle.per_group(prompt)}\n"
            f"  router: {json.dumps(hits)}\n"
            f"  worker: {json.dumps(row)}"
        )


def verdict(tally: Tally) -> None:
    """Fail with the first reports if there are mismatches."""
    if tally.mismatches:
        shown = "\n\n".join(tally.mismatches[:SHOWN_MISMATCHES])
        raise AssertionError(f"{len(tally.mismatches)} mismatches in {tally.probes} probes of {tally.name}\n{shown}")
