# SPDX-License-Identifier: Apache-2.0
"""The price of fetching blocks from another worker, and the choice of worker and source by it."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvrouter.contract.tiers import MEASURED, TOKEN_COSTS
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.transfer_rates import ASSUMED_BYTES_PER_S, UNKNOWN_TOKEN_COST, HostPair
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.load.worker_speed import SAMPLES_MIN, SLOWNESS_MAX, SLOWNESS_MIN
from kvrouter.router.route.placement.candidates import DRAINING
from kvrouter.router.route.placement.choose import LOAD, PULL, TEMPERATURE, Choice, choose
from kvrouter.router.route.placement.copies import Copies
from kvrouter.router.route.placement.cost import ChoiceContext, weigh
from kvrouter.router.route.placement.lenders import (
    ASSUMED_PREFILL_RATE,
    MAX_LENT_TOKENS,
    PULL_LATENCY_S,
    TIMEOUT_MAX_S,
    TIMEOUT_MIN_S,
    TIMEOUT_UNKNOWN_S,
    Lenders,
)
from kvrouter.router.route.placement.policies import policy

TOKENS = 8_192
PULLED = 7_936
CPU_COST = TOKEN_COSTS[MEASURED]
LATENCY_TOKENS = PULL_LATENCY_S * ASSUMED_PREFILL_RATE


def key(name: str) -> WorkerKey:
    return WorkerKey("m", name)


def hit(name: str, gpu: int = 0, *pulls: tuple[str, int], cpu: int = 0, disk: int = 0, full: int = 0) -> Hit:
    by_tier = (gpu, max(gpu, cpu), max(gpu, cpu, disk))
    sources = tuple(Pull(key(source), tokens) for source, tokens in pulls)
    return Hit(key(name), by_tier, "live", full_attention=max(full, gpu), pulls=sources)


class Peers:
    """A fleet whose engines all lend, each on a host of its own."""

    def __init__(self, token_bytes: int = 0) -> None:
        self.token_bytes = token_bytes
        self.without: set[str] = set()

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        if worker.worker_id in self.without:
            return None
        return PeerAddress(f"host-{worker.worker_id}", 7_000, "same", token_bytes=self.token_bytes)


class Scene:
    """The workers of a choice with pulls."""

    def __init__(self, token_bytes: int = 0, saturation: int = 10**9) -> None:
        self.peers = Peers(token_bytes)
        self.weights = LoadModel(LoadTable(), saturation)
        self.out: dict[str, str] = {}
        self.lenders = Lenders(self.peers, self.weights, lambda worker: self.out.get(worker.worker_id))

    def context(self, **fields: Any) -> ChoiceContext:
        arguments = {"num_tokens": TOKENS, "weights": self.weights, "lenders": self.lenders, **fields}
        return ChoiceContext(**arguments)

    def chosen(self, *hits: Hit, **fields: Any) -> Choice:
        return choose(hits, self.context(**fields), Random(0))

    def prefill(self, worker_hit: Hit, **fields: Any) -> float:
        return weigh((worker_hit,), self.context(**fields), worker_hit.tokens).terms[0][0]

    def queue(self, name: str, tokens: int) -> None:
        self.weights.table.reserve(f"at {name}", key(name), tokens, 0, 0.0)

    def lend(self, source: str, tokens: int) -> None:
        self.weights.table.reserve(f"from {source}", key("far"), 0, 0, 0.0, source=key(source), lent_tokens=tokens)

    def speed(self, name: str, rate: float) -> None:
        for _ in range(SAMPLES_MIN):
            self.weights.rates_of(key(name)).first_token(10_000, 0, 0, 10_000 / rate)


def test_a_pulled_token_costs_its_transfer_its_load_and_a_latency() -> None:
    expected = TOKENS - PULLED + PULLED * (CPU_COST + UNKNOWN_TOKEN_COST) + LATENCY_TOKENS
    assert Scene().prefill(hit("a", 0, ("b", PULLED))) == pytest.approx(expected)


def test_the_price_begins_with_the_bytes_of_a_token() -> None:
    token_s = 65_536 / ASSUMED_BYTES_PER_S
    expected = TOKENS - PULLED + PULLED * (CPU_COST + token_s * ASSUMED_PREFILL_RATE) + LATENCY_TOKENS
    assert Scene(token_bytes=65_536).prefill(hit("a", 0, ("b", PULLED))) == pytest.approx(expected)


def test_the_price_follows_the_workers_measured_rate_of_prefill() -> None:
    scene = Scene(token_bytes=65_536)
    scene.speed("a", 3_000)
    scene.weights.tick([key("a"), key("b")], 0.0)
    token_s = 65_536 / ASSUMED_BYTES_PER_S
    expected = TOKENS - PULLED + PULLED * CPU_COST + 3_000 * (PULL_LATENCY_S + PULLED * token_s)
    assert scene.prefill(hit("a", 0, ("b", PULLED))) == pytest.approx(expected)
    # A worker that computes more slowly than usual computes fewer tokens while it waits for the transfer.
    scene.weights.slowness = {key("a"): 2.0}
    slow = TOKENS - PULLED + PULLED * CPU_COST + 1_500 * (PULL_LATENCY_S + PULLED * token_s)
    assert scene.prefill(hit("a", 0, ("b", PULLED))) == pytest.approx(slow)


def test_the_own_tiers_are_loaded_as_without_a_pull() -> None:
    own = hit("a", 1_024, ("b", PULLED), cpu=2_048)
    fetched = PULLED - 2_048
    expected = TOKENS - PULLED + 1_024 * CPU_COST + fetched * (CPU_COST + UNKNOWN_TOKEN_COST) + LATENCY_TOKENS
    assert Scene().prefill(own) == pytest.approx(expected)


def test_nothing_is_fetched_where_computing_is_as_fast() -> None:
    scene = Scene(token_bytes=1)
    latency = round(LATENCY_TOKENS)
    scene.weights.token_costs = (0.0, 0.0, 0.0)
    for fetched in (1, latency - 1, latency):
        assert scene.chosen(hit("a", 0, ("b", fetched))).pull is None
    assert scene.chosen(hit("a", 0, ("b", latency + 1))).pull is not None
    slow = Scene(token_bytes=10**9)
    assert slow.chosen(hit("a", 0, ("b", PULLED))).pull is None
    assert slow.prefill(hit("a", 0, ("b", PULLED))) == TOKENS


def test_nothing_is_fetched_of_what_is_being_computed_there() -> None:
    scene = Scene()
    assert scene.chosen(hit("a", 0, ("b", PULLED)), pending={key("a"): PULLED}).pull is None
    assert scene.chosen(hit("a", 0, ("b", PULLED)), pending={key("a"): 256}).pull is not None


def test_the_choice_names_the_source_and_says_so() -> None:
    choice = Scene().chosen(hit("a", 0, ("w1", PULLED)))
    pull = choice.pull
    assert pull is not None
    assert (pull.source, pull.host, pull.port) == (key("w1"), "host-w1", 7_000)
    assert (pull.tokens, pull.fetched_tokens) == (PULLED, PULLED)
    assert choice.reason == "holds none of the 8192 tokens; fetches 7936 tokens from w1"
    more = Scene().chosen(hit("a", 1_024, ("w1", PULLED)))
    assert more.reason == "reuses 1024 of 8192 tokens (1024 on the GPU); fetches 6912 tokens from w1"
    # The engine is free to compute other prompts while it waits, so the transfer is no work that others wait for.
    assert choice.prefill_tokens == round(TOKENS - PULLED + PULLED * CPU_COST)
    assert choice.candidates[0].pull == Pull(key("w1"), PULLED)
    assert choice.candidates[0].parts.prefill > choice.prefill_tokens


def test_a_busy_holder_lends_to_an_idle_worker() -> None:
    scene = Scene()
    scene.queue("w1", 40_000)
    choice = scene.chosen(hit("w1", 8_000), hit("a", 0, ("w1", PULLED)), hit("b", 0))
    assert choice.hit.worker == key("a") and choice.pull is not None
    # 8,000 tokens are more than the pull brings, so some are lost to the load.
    assert (choice.lost, choice.best_hit_tokens) == (LOAD, 8_000)
    assert choice.reason == (
        "holds none of the 8192 tokens; fetches 7936 tokens from w1; w1 would reuse 8000, but has 40000 tokens of load"
    )
    whole = scene.chosen(hit("w1", PULLED), hit("a", 0, ("w1", PULLED)))
    assert whole.lost == PULL and whole.reason.endswith("; w1 would reuse 7936, but costs more")


def test_a_pull_is_no_reason_where_chance_or_saturation_decides() -> None:
    scene = Scene(saturation=1_000)
    scene.queue("w1", 40_000)
    choice = scene.chosen(hit("w1", PULLED), hit("a", 0, ("w1", PULLED)))
    assert choice.lost == PULL and choice.reason.endswith("but it is saturated")
    context = Scene().context(policy=policy("kv", 1.0), busy=0.0)
    drawn = [choose((hit("w1", PULLED), hit("a", 0, ("w1", PULLED))), context, Random(seed)) for seed in range(50)]
    assert {choice.lost for choice in drawn} == {"", TEMPERATURE}


def test_the_holder_is_chosen_while_it_is_idle() -> None:
    choice = Scene().chosen(hit("w1", PULLED), hit("a", 0, ("w1", PULLED)))
    assert choice.hit.worker == key("w1") and choice.pull is None and choice.lost == ""


def test_the_source_that_lends_least_is_chosen() -> None:
    scene = Scene()
    scene.lend("b", 5_000)
    choice = scene.chosen(hit("a", 0, ("b", PULLED), ("c", PULLED)))
    assert choice.pull is not None and choice.pull.source == key("c")
    longer = scene.chosen(hit("a", 0, ("b", PULLED), ("c", 512)))
    assert longer.pull is not None and longer.pull.source == key("b") and longer.pull.ahead_tokens == 5_000


def test_some_sources_lend_nothing() -> None:
    scene = Scene()
    wanting = hit("a", 0, ("b", PULLED))

    def source(**fields: Any) -> PeerAddress | str | None:
        pull = scene.chosen(wanting, **fields).pull
        return None if pull is None else pull.source.worker_id

    assert source() == "b"
    assert source(failed=frozenset({key("b")})) is None
    assert source(lenders=None) is None
    scene.out = {"b": "its circuit breaker is open"}
    assert source() is None
    # A draining worker still lends.
    scene.out = {"b": DRAINING}
    assert source() == "b"
    scene.peers.without = {"b"}
    assert source() is None
    scene.peers.without = {"a"}
    scene.lenders.tick()
    assert source() is None
    scene.peers.without = set()
    scene.lenders.tick()
    scene.weights.token_costs = (0.0, 0.0, 0.0)
    scene.peers.token_bytes = 1
    scene.weights.transfers.tick(0.0)
    assert source() == "b"
    scene.lend("b", MAX_LENT_TOKENS)
    assert source() is None


def test_another_source_is_taken_where_the_best_lends_nothing() -> None:
    scene = Scene()
    scene.out = {"b": "its circuit breaker is open"}
    pull = scene.chosen(hit("a", 0, ("b", PULLED), ("c", 6_000))).pull
    assert pull is not None and (pull.source, pull.tokens) == (key("c"), 6_000)


def test_the_deadline_is_the_time_in_which_the_tokens_would_be_computed() -> None:
    scene = Scene()

    def timeout_s(num_tokens: int) -> float:
        pull = scene.lenders.plan(hit("a"), Pull(key("b"), num_tokens))
        assert pull is not None
        return pull.timeout_s

    assert timeout_s(PULLED) == TIMEOUT_UNKNOWN_S
    scene.speed("a", 1_000)
    assert timeout_s(PULLED) == pytest.approx(PULLED / 1_000)
    assert timeout_s(16) == TIMEOUT_MIN_S
    assert timeout_s(10**6) == TIMEOUT_MAX_S


def test_a_copy_that_is_fetched_saves_later_prompts_only_what_a_fetch_costs() -> None:
    copies = Copies([0.5 * 256 * piece for piece in range(32)], 256)
    scene = Scene()
    scene.queue("w1", 6_000)
    hits = (hit("w1", PULLED), hit("a", 0, ("w1", PULLED)), hit("b", 0))
    _, fetching, computing = weigh(hits, scene.context(copies=copies), PULLED).terms
    assert computing[7] == pytest.approx(0.5 * PULLED * 6_000 / (6_000 + TOKENS))
    price = (fetching[0] - (TOKENS - PULLED)) / PULLED
    assert fetching[7] == pytest.approx(0.5 * PULLED * price * 6_000 / (6_000 + fetching[2]))


@given(st.data())
def test_a_worker_that_is_no_worse_in_any_respect_costs_no_more_with_pulls(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(2, 100_000))

    def pair(most: int, least: int = 0) -> list[int]:
        return sorted(data.draw(st.tuples(*[st.integers(least, most)] * 2)))

    scene = Scene(token_bytes=data.draw(st.integers(0, 2_000_000)))
    table = scene.weights.table
    scene.weights.token_costs = (0.0, data.draw(st.floats(0, 1)), 1.0)
    (low, high), (few, many), (lent, more_lent) = pair(300_000), pair(10_000_000), pair(2 * MAX_LENT_TOKENS)
    table.reserve("better", key("better"), low, few, 0.0, source=key("b"), lent_tokens=lent)
    table.reserve("worse", key("worse"), high, many, 0.0, source=key("w"), lent_tokens=more_lent)
    slow = sorted(data.draw(st.tuples(*[st.floats(SLOWNESS_MIN, SLOWNESS_MAX)] * 2)))
    scene.weights.slowness = {key("better"): slow[0], key("worse"): slow[1]}
    missing = pair(2_000)
    seconds = sorted(data.draw(st.tuples(*[st.floats(0, 1e-3)] * 2)))
    for source, name, token_s, missing_tokens in zip("bw", ("better", "worse"), seconds, missing, strict=True):
        for _ in range(SAMPLES_MIN):
            hosts = HostPair("m", f"host-{source}", f"host-{name}")
            scene.weights.transfers.learn(hosts, 2_000, missing_tokens, token_s, 0.0)
    (far, near), (far_cpu, near_cpu), (shorter, longer) = pair(tokens - 1), pair(tokens - 1), pair(tokens - 1)
    runs = pair(tokens - 1)
    better = hit("better", near, ("b", longer), cpu=max(near, near_cpu), full=max(near, runs[1]))
    worse = hit("worse", far, ("w", shorter), cpu=max(far, far_cpu), full=max(far, runs[0]))
    if data.draw(st.booleans()):
        worse = hit("worse", far, cpu=max(far, far_cpu), full=max(far, runs[0]))
    saved = st.lists(st.floats(0, 255.9), max_size=50)
    copies = Copies([0.0, *itertools.accumulate(data.draw(saved))], 256)
    context = scene.context(num_tokens=tokens, copies=copies, busy=data.draw(st.floats(0, 0.9)))
    less, more = weigh((better, worse), context, better.tokens).totals
    assert less <= more


@given(st.data())
def test_a_prompt_with_sources_costs_no_more_than_without(data: st.DataObject) -> None:
    scene = Scene(token_bytes=data.draw(st.integers(0, 2_000_000)))
    own = data.draw(st.integers(0, TOKENS - 2))
    pulled = sorted(data.draw(st.lists(st.integers(own + 1, TOKENS - 1), max_size=3)), reverse=True)
    pulls = [(f"s{number}", tokens) for number, tokens in enumerate(pulled)]
    for source, _ in pulls:
        scene.lend(source, data.draw(st.integers(0, 200_000)))
    fetching = weigh((hit("a", own, *pulls),), scene.context(), own)
    alone = weigh((hit("a", own),), scene.context(), own)
    assert fetching.totals[0] <= alone.totals[0]
    assert (0 in fetching.pulls) == (fetching.terms[0][0] < alone.terms[0][0])
    # The cheapest of the sources is taken.
    single = [weigh((hit("a", own, pull),), scene.context(), own).terms[0][0] for pull in pulls]
    assert fetching.terms[0][0] == min([alone.terms[0][0], *single])
