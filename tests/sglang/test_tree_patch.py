# SPDX-License-Identifier: Apache-2.0
"""The patch in SGLang's process leaves SGLang's own events unchanged and raises nothing there.

A cache that it cannot follow is named in the log.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher

from kvrouter.engine_patch.setup.features import FAILED, Features
from kvrouter.engine_patch.setup.settings import SWITCH
from kvrouter.engine_patch.sglang.plugin import ORIGINAL, TAP, patch
from kvrouter.engine_patch.sglang.tree_tap import FEATURES, TreeTap
from tests.sglang.tree_layouts import LAYOUTS, LORAS, TreeLayout
from tests.sglang.tree_oracle import TreeOracle, TreePrompt
from tests.sglang.tree_predictor import TreePredictor
from tests.support.ports import free_port

LAYOUT = next(layout for layout in LAYOUTS if layout.name == "all-16-24")
STEPS = 150
LORA = LORAS[1]

log = logging.getLogger("test")


def tapped(oracle: TreeOracle) -> tuple[TreePredictor, TreeTap]:
    predictor = TreePredictor()
    tap = TreeTap(oracle.cache, predictor, Features(log, FEATURES))
    oracle.tap = tap
    return predictor, tap


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("layout", [LAYOUT, LAYOUTS[0]], ids=lambda layout: layout.name)
def test_sglangs_own_events_are_the_same_with_the_patch(layout: TreeLayout, core: str, seed: int) -> None:
    def events(*, patched: bool) -> list[Any]:
        oracle = TreeOracle(layout, Random(seed), core=core)
        if patched:
            assert tapped(oracle)[1].attach(0, "test", "m")
        batches: list[Any] = []
        take = oracle.cache.take_events
        oracle.cache.take_events = lambda: batches.append(take())
        for _ in range(STEPS):
            oracle.step()
        return [repr(event) for batch in batches for event in batch]

    plain = events(patched=False)
    assert len(plain) > STEPS // 2
    assert events(patched=True) == plain


@pytest.mark.parametrize(
    ("core", "where"), [("python", "take"), ("python", "add"), ("rust", "take"), ("rust", "freed"), ("rust", "settle")]
)
def test_a_failure_of_ours_ends_the_reports_and_not_the_engine(
    core: str, where: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail inside the patch, and check that no block stays credited that is no longer kept up to date."""
    oracle = TreeOracle(LAYOUT, Random(seed), core=core)
    predictor, tap = tapped(oracle)
    assert tap.attach(0, "test", "m")
    for _ in range(20):
        oracle.step()
    assert predictor.held and tap._residency is not None

    def fail(*_: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(type(tap._residency), where, fail)
    for _ in range(60):
        oracle.step()
    assert predictor.withheld == f"components: {FAILED}" and not predictor.held
    # The heartbeats report the failure, so the reporter stays open.
    assert not predictor.closed
    collected = ("_changed", "_alive", "_reported") if core == "python" else ("_nodes", "_by_slot", "_heads", "_named")
    assert not any(getattr(tap._residency, name) for name in collected), "it grows no more"


def test_what_is_held_is_as_if_it_had_been_followed_from_the_start(seed: int) -> None:
    """Compare a patch that joins late with one that was there from the beginning."""
    oracle = TreeOracle(LAYOUT, Random(seed))
    first, tap = tapped(oracle)
    assert tap.attach(0, "test", "m")
    for _ in range(STEPS):
        oracle.step()
    held = {place: hashes for place, hashes in first.held.items() if hashes}
    late, tap = tapped(oracle)
    assert tap.attach(0, "test", "m")
    oracle.end_step()
    assert held
    assert {place: hashes for place, hashes in late.held.items() if hashes} == held


class OtherCore:
    """A core that is neither of the two known ones."""


def test_a_core_that_does_not_tell_what_it_frees_is_named(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    oracle = TreeOracle(LAYOUT, Random(seed))
    oracle.cache.tree_core = OtherCore()
    predictor, tap = tapped(oracle)
    with caplog.at_level(logging.WARNING):
        assert not tap.attach(0, "test", "m")
    assert predictor.closed and predictor.catalog is None
    assert "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python" in caplog.text


def test_a_rust_core_is_not_followed_with_a_host_tier(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """Refuse a core that has a host tier at once, and stop following a core that gets one later."""
    oracle = TreeOracle(LAYOUT, Random(seed), core="rust")
    predictor, tap = tapped(oracle)
    assert tap.attach(0, "test", "m")
    oracle.step()
    assert predictor.stored and not predictor.closed
    oracle.cache.tree_core.set_hicache_enabled()
    with caplog.at_level(logging.WARNING):
        oracle.end_step()
        assert "HiCache" in predictor.withheld and not predictor.held
        late, tap = tapped(oracle)
        assert not tap.attach(0, "test", "m")
    assert late.closed and caplog.text.count("HiCache") == 2


def test_a_rust_core_that_holds_something_already_is_not_followed(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    oracle = TreeOracle(LAYOUT, Random(seed), core="rust")
    for _ in range(STEPS):
        oracle.step()
    predictor, tap = tapped(oracle)
    with caplog.at_level(logging.WARNING):
        assert not tap.attach(0, "test", "m")
    assert predictor.closed and "before the patch" in caplog.text


@pytest.fixture
def unpatched() -> Iterator[None]:
    names = ("init_kv_events", "publish_kv_events")
    stock = {name: getattr(SchedulerKvEventsPublisher, name) for name in names}
    yield
    for name, method in stock.items():
        setattr(SchedulerKvEventsPublisher, name, method)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_entry_point_follows_the_schedulers_publisher(switch: str, seed: int, unpatched: None) -> None:
    assert patch({SWITCH: switch}, log) is (switch == "1")
    assert hasattr(SchedulerKvEventsPublisher.publish_kv_events, ORIGINAL) is (switch == "1")
    runtime: Any = importlib.import_module("sglang.srt.managers.scheduler_components.kv_events_publisher")
    was = runtime.is_kv_publisher_rank
    runtime.is_kv_publisher_rank = bool
    parallel, runtime.get_parallel = runtime.get_parallel, lambda: type("Ranks", (), dict.fromkeys(RANKS, 0))
    oracle = TreeOracle(LAYOUT, Random(seed))
    config = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"})
    publisher = None
    try:
        publisher = SchedulerKvEventsPublisher(
            kv_events_config=config,
            tree_cache=oracle.cache,
            send_metrics_from_scheduler=None,
            max_running_requests=1,
            max_total_num_tokens=1,
            get_stats=lambda: None,
        )
        tap = getattr(publisher.kv_event_publisher, TAP, None)
        assert (tap is not None) is (switch == "1")
        oracle.step()
        publisher.publish_kv_events()
    finally:
        if publisher is not None:
            publisher.kv_event_publisher.shutdown()
        runtime.is_kv_publisher_rank, runtime.get_parallel = was, parallel


RANKS = ("attn_dp_size", "attn_dp_rank", "dp_rank")


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize(("salt", "lora"), [(None, None), ("a", None), (None, LORA), ("a", LORA)])
@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "pairs"])
def test_a_node_may_be_cut_several_times_in_one_step(
    eagle: bool, salt: str | None, lora: str | None, core: str, seed: int
) -> None:
    """Split a node several times in one step; after each split, a page is on a node that no insertion names."""
    layout = TreeLayout("cut", ("FULL",), 16, eagle=eagle, salts=(salt,), loras=(lora,))
    oracle = TreeOracle(layout, Random(seed), core=core)
    predictor, tap = tapped(oracle)
    assert tap.attach(0, "test", "m")
    long = list(range(100, 197))
    oracle.insert(TreePrompt(long, salt, lora))
    oracle.end_step()
    branches = [long[:shared] + [shared] * 21 for shared in (33, 65, 49, 17)]
    for branch in branches:
        oracle.insert(TreePrompt(branch, salt, lora))
    oracle.end_step()
    assert tap._feature.on and not predictor.withheld
    for tokens in (long, *branches, [*long, 1], *([*branch, 1] for branch in branches)):
        prompt = TreePrompt(tokens, salt, lora)
        assert predictor.hit(*prompt).on_gpu == oracle.reused(prompt) > 0
        oracle.end_step()


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("salt", [None, "a"])
def test_a_leaf_may_come_and_go_in_one_step_with_a_cut_that_stays(salt: str | None, core: str, seed: int) -> None:
    """Insert and evict a leaf in one step, although only the leaf leads to the upper part of the node that it split."""
    layout = TreeLayout("cut", ("FULL",), 16, salts=(salt,))
    oracle = TreeOracle(layout, Random(seed), core=core)
    predictor, tap = tapped(oracle)
    assert tap.attach(0, "test", "m")
    long = TreePrompt(list(range(100, 197)), salt, None)
    upper = TreePrompt(long.tokens[:33], salt, None)
    oracle.insert(long)
    oracle.end_step()
    oracle.insert(TreePrompt(upper.tokens + [7] * 16, salt, None))
    # Make the inserted leaf the next to be evicted.
    assert oracle.reused(long) == 96
    oracle.evict(16)
    oracle.end_step()
    oracle.evict(64)
    oracle.end_step()
    assert predictor.hit(*long).on_gpu == predictor.hit(*upper).on_gpu == 32
    assert oracle.reused(long) == oracle.reused(upper) == 32
