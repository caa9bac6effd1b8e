# SPDX-License-Identifier: Apache-2.0
"""Claim: a match of 512 blocks over 16 workers takes at most 25 us in process.

The script times `Matcher.match` on a mirror of 200,000 and of 10^6 (worker, block) entries: with the same prompt again
and again (hot); with random prompts of the index (cold: their table entries are rarely in the CPU's caches); and with
prompts of 8,192 token ids, remembered and not.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.report import Row, Settings, below, median_row, progress, run
from benchmarks.workload import BLOCK_TOKENS, CHAIN_BLOCKS, MODEL, WORKERS, Chain, Workload, chains_for, places
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState

MIRROR_BYTES = 1 << 30
MEMORY_BYTES = 256 << 20
GOAL_US = 25.0
NUM_TOKENS = CHAIN_BLOCKS * BLOCK_TOKENS + 1


def build(chains: list[Chain]) -> tuple[Mirror, HashPlans]:
    """Build a mirror that holds the prompts where the other benchmarks' events would put them."""
    mirror = Mirror(MIRROR_BYTES)
    catalog = build_catalog((Group(0, "full_attention", BLOCK_TOKENS),), "learned", CatalogSpec())
    keys = [WorkerKey(MODEL, str(worker)) for worker in range(WORKERS)]
    for key in keys:
        mirror.begin_epoch(key, "e")
    for index, chain in enumerate(chains):
        for worker in places(index):
            mirror.add(keys[worker], Place(0, GPU), chain.hashes)
    scheme = HashScheme.default()
    views = [WorkerView(key, None, StreamState.LIVE, True, "", "e", catalog, scheme, {}) for key in keys]
    return mirror, HashPlans.build(mirror, views)


def time_calls(matcher: Matcher, plans: HashPlans, questions: list[Question]) -> float:
    """Return the median time of one question, in us."""
    clock = time.perf_counter_ns
    taken = np.empty(len(questions))
    for i, question in enumerate(questions):
        start = clock()
        matcher.match(question, plans)
        taken[i] = clock() - start
    return float(np.median(taken)) / 1000


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    rounds = settings.pick(9, 3)
    calls = settings.pick(4000, 300)
    token_calls = settings.pick(400, 40)
    rows = []
    notes = []
    for entries in (settings.pick(200_000, 20_000), settings.pick(1_000_000, 60_000)):
        progress(f"match: {entries:,} entries")
        chains = Workload().chains(chains_for(entries))
        mirror, plans = build(chains)
        order = np.random.default_rng(2).integers(0, len(chains), max(calls, token_calls))
        questions = [Question(MODEL, NUM_TOKENS, block_hashes=chain.hashes) for chain in chains]
        prompts = [Question(MODEL, len(chain.tokens), token_ids=chain.tokens) for chain in chains]
        for index, question in enumerate(questions[:64]):
            check(Matcher(mirror, SegmentMemory(0)), plans, question, index)
        matcher = Matcher(mirror, SegmentMemory(MEMORY_BYTES))
        forgetful = Matcher(mirror, SegmentMemory(0))
        kinds = {
            "hot": (matcher, [questions[0]] * calls),
            "cold": (matcher, [questions[i] for i in order[:calls]]),
            "8,192 token ids, remembered": (matcher, [prompts[0]] * token_calls),
            "8,192 token ids, new": (forgetful, [prompts[i] for i in order[:token_calls]]),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, (matcher_of_kind, questions_of_kind) in kinds.items():
                taken[kind].append(time_calls(matcher_of_kind, plans, questions_of_kind))
        for kind, values in taken.items():
            by_tokens = "token" in kind
            goal = None if by_tokens else below(GOAL_US)
            text = "" if by_tokens else f"at most {GOAL_US:.0f}"
            name = f"match in process, {mirror.entries:,} entries, {kind}" + ("" if by_tokens else " 512 hashes")
            rows.append(median_row(name, "us", values, goal=text, wanted=goal))
        notes.append(
            f"{mirror.entries:,} entries: {mirror.bytes / mirror.entries:.1f} bytes an entry in the mirror's arrays"
        )
    return rows, notes


def check(matcher: Matcher, plans: HashPlans, question: Question, index: int) -> None:
    """Raise AssertionError unless every worker that holds the prompt hits all of it."""
    hits = {int(hit.worker.worker_id): hit.on_gpu for hit in matcher.match(question, plans)}
    for worker in places(index):
        if hits[worker] != CHAIN_BLOCKS * BLOCK_TOKENS:
            raise AssertionError(f"prompt {index}: worker {worker} hits {hits[worker]} tokens")


if __name__ == "__main__":
    run("match_in_process", __doc__, measure)
