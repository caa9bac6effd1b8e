# SPDX-License-Identifier: Apache-2.0
"""The fewest uncached tokens win; ties go to the nearer tier, then to chance."""

from __future__ import annotations

from collections import Counter
from random import Random

from kvrouter.router.choose import Choice, choose, route_name
from kvrouter.router.names import WorkerKey
from kvrouter.router.question import Hit


def hit(name: str, gpu: int, cpu: int | None = None, disk: int | None = None, rank: int = 0) -> Hit:
    cpu = gpu if cpu is None else cpu
    return Hit(WorkerKey("m", name, rank), gpu, cpu, cpu if disk is None else disk, "live")


def chosen(*hits: Hit, seed: int = 0) -> Choice:
    return choose(hits, 200, {"a": "http://a", "b": "http://b", "a@1": "http://a1"}, Random(seed))


def test_the_longest_reuse_wins_whatever_tier_it_comes_from() -> None:
    assert chosen(hit("a", 96), hit("b", 16, 112)).hit.worker.worker_id == "b"
    assert chosen(hit("a", 96), hit("b", 16, 16, 112)).hit.worker.worker_id == "b"


def test_among_equal_costs_the_nearer_tier_wins() -> None:
    for seed in range(20):
        assert chosen(hit("a", 16, 96), hit("b", 96), seed=seed).hit.worker.worker_id == "b"
        assert chosen(hit("a", 16, 16, 96), hit("b", 16, 96), seed=seed).hit.worker.worker_id == "b"


def test_full_ties_are_broken_by_chance() -> None:
    wins = Counter(
        chosen(hit("a", 96), hit("b", 96), hit("c", 96), seed=seed).hit.worker.worker_id for seed in range(600)
    )
    assert set(wins) == {"a", "b", "c"} and min(wins.values()) > 120


def test_the_choice_explains_itself() -> None:
    choice = chosen(hit("a", 64, 128, 160), hit("b", 0))
    assert choice.url == "http://a"
    assert choice.reason == (
        "reuses 160 of 200 tokens (64 on the GPU, 64 more from the CPU tier, 32 more from storage)"
    )
    assert [(c.hit.worker.worker_id, c.cost) for c in choice.candidates] == [("a", 40), ("b", 200)]
    assert "chosen at random among 2 equals" in chosen(hit("a", 96), hit("b", 96)).reason
    assert chosen(hit("a", 0)).reason == "no worker holds a reusable prefix of the 200 tokens"


def test_a_rank_has_its_own_url() -> None:
    choice = chosen(hit("a", 16), hit("a", 96, rank=1))
    assert choice.url == "http://a1" and route_name(choice.hit) == "a@1"
