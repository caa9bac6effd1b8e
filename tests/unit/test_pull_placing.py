# SPDX-License-Identifier: Apache-2.0
"""Placements with a pull: what the source lends, until when, and what is learned from the answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.load.load_messages import LoadMessage, WorkerTotals, decode, encode
from kvrouter.router.route.load.load_table import PREFILL_TTL_S, RESERVATION_TTL_S, Totals
from kvrouter.router.route.load.transfer_rates import HostPair
from kvrouter.router.route.load.worker_speed import SAMPLES_MIN
from kvrouter.router.route.placement.lenders import MAX_LENT_TOKENS, PULL_LATENCY_S
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from tests.support.placing_stage import OF_QUESTION, Stage, ask, hit

TOKENS = 8_192
PULLED = 7_936
RATE = 10_000.0
HOSTS = HostPair("m", "host-w", "host-a")


def key(name: str) -> WorkerKey:
    return WorkerKey("m", name)


def wanting(name: str, *sources: str, tokens: int = PULLED) -> Hit:
    return Hit(key(name), all_on_gpu(0), "live", pulls=tuple(Pull(key(source), tokens) for source in sources))


def request(seed: int = 0, **fields: Any) -> PlacementRequest:
    return ask(seed, TOKENS, exclude_worker_ids=frozenset({"w"}), **fields)


def stage(*hits: Hit, **settings: Any) -> Stage:
    """Return a stage on which worker `w` holds most of each prompt, and all engines lend."""
    made = Stage(*(hits or (hit("w", PULLED), wanting("a", "w"), hit("b"))), **settings)
    for worker_hit in made.fleet.known:
        name = worker_hit.worker.worker_id
        made.fleet.peers[name] = PeerAddress(f"host-{name}", 7_000, "same", token_bytes=65_536)
    return made


def lent(on: Stage, source: str = "w") -> int:
    load = on.placer.weights.table.loads.get(key(source))
    return 0 if load is None else load.lent_tokens


def gauge(on: Stage) -> float:
    """Return the tokens that `w` lends, as the metrics show them."""
    on.placer._measure()
    return on.counted("load_lent_tokens", worker="w")


def fetching(on: Stage, seed: int = 0) -> Placement:
    placement = on.placer.reserve(request(seed))
    assert placement.pull is not None and placement.worker == key("a")
    return placement


def test_a_source_lends_from_the_choice_to_the_first_token() -> None:
    on = stage()
    placement = fetching(on)
    assert lent(on) == placement.choice.pull.fetched_tokens == PULLED  # type: ignore[union-attr]
    assert on.load("w") == (0, 0, 0)
    assert gauge(on) == PULLED
    assert placement.predicted_tokens == 0 and placement.expected_tokens == 0
    for _ in range(2):
        placement.first_token()
        assert lent(on) == gauge(on) == 0
    # The report of the delivered tokens still finds the pull.
    assert placement.pull is not None
    placement.done()
    assert lent(on) == 0 and not on.placer.weights.table.loads


@pytest.mark.parametrize("end", ["done", "released", "idle engine", "moved"])
def test_each_end_of_a_request_ends_its_pull_once(end: str) -> None:
    on = stage()
    placement, table = fetching(on), on.placer.weights.table
    table.reserve("other", key("b"), 0, 0, on.now, source=key("w"), lent_tokens=100)
    on.now = 5.0
    if end == "done":
        placement.done()
        placement.done()
    elif end == "released":
        assert on.placer.end_here(placement.selection_id, "release")
        assert not on.placer.end_here(placement.selection_id, "release")
    elif end == "idle engine":
        assert table.void(key("a"), on.now, on.now) == 1
    else:
        placement.served_by(hit("b"))
        assert placement.pull is None
    assert lent(on) == 100
    placement.first_token()
    placement.done()
    assert lent(on) == 100


@pytest.mark.parametrize(("after_s", "requests"), [(PREFILL_TTL_S, 1), (RESERVATION_TTL_S, 0)])
def test_the_pull_of_a_request_that_is_never_heard_of_again_ends(after_s: float, requests: int) -> None:
    on = stage()
    fetching(on)
    on.now = after_s
    on.placer.tick()
    assert lent(on) == 0 and on.load("a")[2] == requests


def test_a_fallback_fetches_from_the_source_that_its_request_names() -> None:
    on = stage()
    placement = fetching(on)
    fallback = msgspec.structs.replace(wanting("b", "c", "w", tokens=6_000), by_tier=all_on_gpu(2_000))
    placement.served_by(fallback)
    assert placement.pull is None and (lent(on), lent(on, "c")) == (4_000, 0)
    placement.first_token()
    assert lent(on) == 0
    placement.done()
    assert not on.placer.weights.table.loads
    # After the first token, everything has been fetched.
    placement = fetching(on, 1)
    placement.first_token()
    placement.served_by(fallback)
    assert lent(on) == 0


def test_a_selection_lends_once_it_is_reserved() -> None:
    on = stage()
    choice = on.placer.choose(request(), "s")
    assert choice.pull is not None and lent(on) == 0
    placement = on.placer.claim("s", "m")
    assert lent(on) == PULLED and placement.pull == choice.pull
    placement.done()
    assert lent(on) == 0


def test_a_hundred_prompts_at_once_do_not_herd_on_one_source() -> None:
    names = [f"d{number}" for number in range(100)]
    on = stage(hit("w", PULLED), *[wanting(name, "w") for name in names], saturation_tokens=2**40)
    for name in names:
        on.placer.weights.rates_of(key(name)).first_token(20_000, 0, 0, 1.0)
    placements = [on.placer.reserve(request(seed)) for seed in range(100)]
    pulls = [placement.pull for placement in placements if placement.pull is not None]
    # At the assumed rates a token is transferred 6 times faster than it is computed, and loading takes a part of that.
    assert 1 <= len(pulls) <= 6
    assert lent(on) == sum(pull.fetched_tokens for pull in pulls) <= MAX_LENT_TOKENS + PULLED
    assert [pull.ahead_tokens for pull in pulls] == [number * PULLED for number in range(len(pulls))]
    for placement in placements:
        placement.done()
    assert lent(on) == 0 and not on.placer.weights.table.loads


def test_prompts_spread_over_the_sources() -> None:
    names = [f"d{number}" for number in range(8)]
    sources = "wxyz"
    on = stage(*[hit(name, PULLED) for name in sources], *[wanting(name, *sources) for name in names])
    excluded = frozenset(sources)
    placements = [on.placer.reserve(ask(seed, TOKENS, exclude_worker_ids=excluded)) for seed in range(8)]
    assert all(placement.pull for placement in placements)
    assert [lent(on, source) for source in sources] == [2 * PULLED] * 4


def test_pulls_of_other_processes_count_too() -> None:
    on = stage()
    table = on.placer.weights.table
    fetching(on)
    assert lent(on) == PULLED
    message = LoadMessage("p", True, [WorkerTotals.of(worker, total) for worker, total in table.own().items()])
    received = decode(encode(message))
    assert received is not None
    other = stage()
    totals = {entry.worker: entry.totals for entry in received.totals}
    other.placer.weights.table.heard("p", totals, whole=True, now=0.0)
    assert lent(other) == PULLED
    pull = other.placer.reserve(request(1)).pull
    assert pull is not None and pull.ahead_tokens == PULLED
    other.placer.weights.table.forget_process("p", 0.0)
    assert lent(other) == PULLED


class OldTotals(msgspec.Struct, array_like=True):
    """The totals as processes of earlier versions know them."""

    model: str
    worker_id: str
    dp_rank: int
    prefill_tokens: int
    decode_tokens: int
    requests: int


def test_processes_of_both_versions_understand_each_other() -> None:
    new = WorkerTotals.of(key("a"), Totals(1, 2, 3, 4))
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=OldTotals)
    assert old == OldTotals("m", "a", 0, 1, 2, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=WorkerTotals).totals == Totals(1, 2, 3)


def whole(on: Stage, placement: Placement, seconds: float) -> None:
    """Answer a placement whose blocks all arrived; its first token comes after this time."""
    on.now += seconds
    placement.first_token()
    placement.done(10)
    placement.reused(PULLED)


def measured(on: Stage) -> Stage:
    """Return the stage after worker `a` has shown its rate of prefill."""
    for _ in range(SAMPLES_MIN):
        on.placer.weights.rates_of(key("a")).first_token(10_000, 0, 0, 10_000 / RATE)
    on.placer.weights.tick([key("a"), key("b"), key("w")], on.now)
    return on


def known_token_s(on: Stage) -> float:
    return on.placer.weights.transfers.rate(HOSTS, 65_536, RATE)[0]


def test_the_rate_of_a_pair_of_hosts_is_learned_from_first_tokens() -> None:
    on = measured(stage())
    token_s = 2e-5
    cpu_cost = on.placer.weights.token_costs[1]
    for seed in range(SAMPLES_MIN):
        placement = fetching(on, seed)
        computing_s = (TOKENS - PULLED + PULLED * cpu_cost) / RATE
        whole(on, placement, computing_s + PULL_LATENCY_S + PULLED * token_s)
    assert known_token_s(on) == pytest.approx(token_s)
    assert on.counted("peer_pull_seconds_count", model="m") == SAMPLES_MIN
    assert on.counted("peer_pull_seconds_sum", model="m") == pytest.approx(SAMPLES_MIN * PULLED * token_s)
    assert on.placer.weights.rates_of(key("a")).loaded_token_cost is None
    assert on.placer.weights.rates_of(key("a")).prefill_rate == RATE


def test_what_a_source_lent_before_does_not_make_its_network_slower() -> None:
    on = measured(stage())
    cpu_cost = on.placer.weights.token_costs[1]
    on.placer.weights.table.reserve("other", key("b"), 0, 0, on.now, source=key("w"), lent_tokens=PULLED)
    for seed in range(SAMPLES_MIN):
        placement = fetching(on, seed)
        computing_s = (TOKENS - PULLED + PULLED * cpu_cost) / RATE
        whole(on, placement, computing_s + PULL_LATENCY_S + 2 * PULLED * 1e-5)
    assert known_token_s(on) == pytest.approx(1e-5)


def test_a_pull_that_fell_short_teaches_no_rate_but_makes_the_next_dearer() -> None:
    on = measured(stage())
    before = known_token_s(on)
    for seed in range(20):
        placement = on.placer.reserve(request(seed))
        if placement.pull is None:
            break
        on.now += 9.0
        placement.first_token()
        placement.done(10)
        placement.reused(0)
    else:
        raise AssertionError("blocks that never arrive are fetched again and again")
    assert known_token_s(on) == before
    assert on.placer.weights.rates_of(key("a")).prefill_rate == RATE


def test_a_long_queue_hides_the_transfer_so_nothing_is_learned() -> None:
    on = measured(stage(hit("w", PULLED), wanting("a", "w")))
    before = known_token_s(on)
    on.placer.weights.table.reserve("queued", key("a"), 5_000, 0, on.now)
    for seed in range(SAMPLES_MIN):
        whole(on, fetching(on, seed), 3.0)
    assert known_token_s(on) == before


def test_the_time_of_a_prompt_with_a_pull_is_no_rate_of_prefill() -> None:
    on = stage()
    for seed in range(SAMPLES_MIN):
        # The client states more work than a pull leaves.
        placement = on.placer.reserve(request(seed), prefill_tokens=TOKENS)
        assert placement.pull is not None
        on.now += 1.0
        placement.first_token()
        placement.done()
    assert on.placer.weights.rates.get(key("a")) is None


def test_the_engines_report_of_a_pull_changes_no_expectation() -> None:
    on = stage()
    placement = fetching(on)
    placement.first_token()
    placement.reused(PULLED)
    assert on.placer._decider._shares._shares == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"answers": 2},
        {"may_pull": False},
        {"is_owned": True, "pinned": "a"},
        {"exclude_workers": frozenset({key("w")})},
    ],
)
def test_some_requests_fetch_nothing(fields: dict[str, Any]) -> None:
    on = stage()
    asked = request()
    of_question = {name: value for name, value in fields.items() if name in OF_QUESTION}
    others = {name: value for name, value in fields.items() if name not in of_question}
    question = msgspec.structs.replace(asked.question, **of_question)
    placement = on.placer.reserve(msgspec.structs.replace(asked, question=question, **others))
    assert placement.pull is None and lent(on) == 0


def test_vllms_own_tier_fetches_nothing_where_it_may_not_read_the_source() -> None:
    for exchange in ("same", "vllm-p2p:1"):
        for declared in (True, False):
            on = stage()
            on.fleet.peers = {name: PeerAddress(f"host-{name}", 7_000, exchange) for name in on.fleet.peers}
            placement = on.placer.reserve(request(pulls_declared=declared))
            assert (placement.pull is None) is (declared and exchange != "same")


def test_a_setting_stops_pulls_at_once() -> None:
    on = stage(peer_pulls="off")
    assert on.placer.reserve(request()).pull is None
    on = stage()
    assert on.placer.reserve(request()).pull is not None
    on.placer.apply(Config(peer_pulls="off"))
    assert on.placer.reserve(request(1)).pull is None


def test_a_prompt_that_is_handed_over_is_not_fetched_too() -> None:
    on = stage(hit("w", PULLED), wanting("a", "w", tokens=6_000), wanting("p", "w", tokens=6_000))
    on.placer.weights.table.reserve("queued", key("a"), 60_000, 0, on.now)
    placement = on.placer.reserve(request())
    choice = placement.choice
    assert choice.prefill is not None and choice.pull is None and choice.prefill.pull is None
    assert "fetches" not in choice.reason and lent(on) == 0
    # The work of the decode worker if no prefill worker computes the prompt.
    assert choice.alone_tokens == TOKENS
    placement.prefill_failed(None)
    assert placement.pull is None and lent(on) == 0
    placement.done()
    assert on.load("p") == (0, 0, 0)
