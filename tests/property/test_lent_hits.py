# SPDX-License-Identifier: Apache-2.0
"""Hits with chunks of another worker: those of a worker whose CPU tier holds what both CPU tiers hold."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.compiled import UNCOMPILED
from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.matching.exchanges import MAX_SOURCES
from kvrouter.router.model.kvcache.catalog import Catalog
from tests.support.examples import examples
from tests.support.lending import (
    alone,
    cpu_only,
    disk_lenders,
    lenders,
    lent_of,
    random_catalog,
    random_residency,
    union,
)

SAMPLE = 40


def made_up(draw: random.Random, most_workers: int) -> tuple[Catalog, list[dict[Place, set[int]]], int]:
    """Return a catalog, what each worker holds, and the length of a prompt."""
    catalog, num_tokens = random_catalog(draw), draw.randint(1, 200)
    workers = [random_residency(draw, catalog, num_tokens) for _ in range(draw.randint(2, most_workers))]
    if draw.random() < 0.3:
        # A replica that has just started.
        workers[0] = {}
    return catalog, workers, num_tokens


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32))
def test_a_pull_reuses_what_one_worker_with_both_cpu_tiers_would(seed: int) -> None:
    catalog, workers, num_tokens = made_up(random.Random(seed), 2)
    hits = lenders(workers, catalog).hits(num_tokens)
    for hit, own, other in zip(hits, workers, workers[::-1], strict=True):
        assert hit.by_tier == alone(own, catalog, num_tokens).by_tier
        reach = alone(cpu_only(other), catalog, num_tokens).tokens
        both = alone(union(own, cpu_only(other)), catalog, num_tokens).tokens
        expected = [both] if reach > hit.tokens and both > hit.tokens else []
        assert [pull.tokens for pull in hit.pulls] == expected


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32))
def test_a_pull_counts_the_disk_of_a_source_that_lends_it(seed: int) -> None:
    draw = random.Random(seed)
    catalog, workers, num_tokens = made_up(draw, 2)
    lend_disk = [draw.random() < 0.7 for _ in workers]
    hits = disk_lenders(workers, catalog, lend_disk).hits(num_tokens)
    for number, (hit, own) in enumerate(zip(hits, workers, strict=True)):
        lent = lent_of(workers[1 - number], lend_disk[1 - number])
        reach = alone(lent, catalog, num_tokens).tokens
        both = alone(union(own, lent), catalog, num_tokens).tokens
        expected = [both] if reach > hit.tokens and both > hit.tokens else []
        assert [pull.tokens for pull in hit.pulls] == expected
        assert hit.by_tier == alone(own, catalog, num_tokens).by_tier


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 2**32))
def test_the_sources_are_those_whose_cpu_tiers_reach_furthest(seed: int) -> None:
    catalog, workers, num_tokens = made_up(random.Random(seed), 9)
    hits = lenders(workers, catalog).hits(num_tokens)
    reaches = {
        hit.worker: alone(cpu_only(held), catalog, num_tokens).tokens for hit, held in zip(hits, workers, strict=True)
    }
    best = sorted(reaches.values(), reverse=True)[:MAX_SOURCES]
    chosen = {pull.source for hit in hits for pull in hit.pulls}
    assert len(chosen) <= MAX_SOURCES and all(reaches[source] in best for source in chosen)
    of_worker = dict(zip(reaches, workers, strict=True))
    for hit in hits:
        tokens = [pull.tokens for pull in hit.pulls]
        sources = [pull.source for pull in hit.pulls]
        assert tokens == sorted(tokens, reverse=True) and all(number > hit.tokens for number in tokens)
        assert hit.worker not in sources and len(set(sources)) == len(sources)
        if max(reaches[worker] for worker in reaches if worker != hit.worker) <= hit.tokens:
            assert not hit.pulls
        for pull in hit.pulls:
            both = union(of_worker[hit.worker], cpu_only(of_worker[pull.source]))
            assert pull.tokens == alone(both, catalog, num_tokens).tokens
        if not of_worker[hit.worker] and best[0]:
            # A worker that holds nothing reuses what the source does, and no pair of them is better than the first.
            assert tokens[0] == best[0]


def sample() -> list[list[list[object]]]:
    """Return the pulls of a fixed sample, to compare the compiled judge with the uncompiled one."""
    fleets = []
    for seed in range(SAMPLE):
        catalog, workers, num_tokens = made_up(random.Random(seed), 6)
        hits = disk_lenders(workers, catalog, [number % 2 == 1 for number in range(len(workers))]).hits(num_tokens)
        fleets.append([[pull.source.worker_id, pull.tokens] for hit in hits for pull in hit.pulls])
    return fleets


def test_the_judge_finds_the_same_pulls_uncompiled() -> None:
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, UNCOMPILED: "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sample()
    assert sum(map(len, sample())) > SAMPLE


if __name__ == "__main__":
    print(json.dumps(sample()))
