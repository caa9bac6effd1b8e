# SPDX-License-Identifier: Apache-2.0
"""The patch is absent when it is switched off, and a failure of ours costs one feature and no request.

The same holds for a place in vLLM that looks different.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

import vllm
from vllm.distributed import kv_events
from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core

from kvrouter.engine_patch import plugin
from kvrouter.engine_patch.hooks import event_tap as tap
from kvrouter.engine_patch.hooks import offload_events as offloading
from kvrouter.engine_patch.hooks import positions, publisher, resets
from kvrouter.engine_patch.hooks.publisher import ATTRIBUTE, ORIGINAL
from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.setup.features import FAILED, FEATURES, NEWEST_KNOWN_VERSION, OLDEST_VERSION, ON
from kvrouter.engine_patch.setup.settings import SWITCH
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, SIMPLE_SETS
from tests.engine.oracle import Oracle
from tests.engine.patched import ENVIRONMENT, PLACES, WatchedOracle, last_reported, patched, reporter_of, tap_of
from tests.engine.workload import PromptTree
from tests.support.report_peer import eventually

pytestmark = pytest.mark.engine

OFFLOAD = next(offload_set for offload_set in OFFLOAD_SETS if offload_set.name.startswith("cpu full, self"))

SIMPLE = SIMPLE_SETS[0]


def work(oracle: Oracle, rng: Random) -> None:
    """Run a load that uses every hooked place, and check that each request ends as it should."""
    tree = PromptTree(rng, 512)
    requests: list[Any] = []
    make = oracle._request

    def request(*args: Any) -> Any:
        vllm_request = make(*args)
        vllm_request.kv_cache_report_mode = "full"
        if len(requests) % 5 == 0:
            vllm_request.lora_request = LoRARequest(
                lora_name="a", lora_int_id=1, lora_path=f"/adapters/{len(requests)}"
            )
        requests.append(vllm_request)
        return vllm_request

    oracle._request = request  # type: ignore[assignment, method-assign]
    for i in range(90):
        if oracle.unfinished < 4:
            oracle.submit(tree.request())
        oracle.step(tree)
        if i % 30 == 29:
            while oracle.unfinished:
                oracle.step(tree)
            assert oracle.scheduler.reset_prefix_cache(reset_connector=i == 59)
    assert len(requests) > 10
    assert all(vllm_request.is_finished() for vllm_request in requests)


def untouched() -> None:
    assert EventPublisherFactory._registry["zmq"] is ZmqEventPublisher
    for owner, name in PLACES:
        assert not hasattr(getattr(owner, name), ORIGINAL)


# The switch and the version


@pytest.mark.parametrize("value", ["0", "off"])
def test_switched_off_nothing_is_exchanged(value: str, model: Path, seed: int) -> None:
    constructor, init = EventPublisherFactory._registry["zmq"], Scheduler.__init__
    with patched({SWITCH: value}, applied=False) as records:
        untouched()
        assert EventPublisherFactory._registry["zmq"] is constructor and Scheduler.__init__ is init
        oracle = Oracle(OFFLOAD.group_set, model, Random(seed), OFFLOAD.connector_config())
        offload = oracle.scheduler.connector.connector_scheduler
        pool = oracle.scheduler.kv_cache_manager.block_pool
        wrapped = (oracle.scheduler, pool, offload, offload.manager, offload._events_tracker)
        try:
            # No instance has a replaced function, except the publisher, whose batches the oracle counts.
            assert not [name for owner in wrapped for name, value in vars(owner).items() if callable(value)]
            assert type(oracle.scheduler.kv_event_publisher._event_queue).__name__ == "Queue"
            assert not hasattr(oracle.scheduler.kv_event_publisher, ATTRIBUTE)
        finally:
            oracle.close()
    assert records.texts == []


def test_an_engine_without_events_starts_nothing() -> None:
    started: list[object] = []
    with patched(start=lambda *args: started.append(args)):
        assert type(EventPublisherFactory.create(None, 0)).__name__ == "NullEventPublisher"
    assert started == []


def test_applied_twice_is_applied_once() -> None:
    with patched():
        constructor, init = EventPublisherFactory._registry["zmq"], Scheduler.__init__
        assert plugin.patch(ENVIRONMENT, logging.Logger("again")) is True
        assert EventPublisherFactory._registry["zmq"] is constructor and Scheduler.__init__ is init
    untouched()


@pytest.mark.parametrize("version", ["0.19.1", "0.11.0", "0.19.2rc1.dev3+gabc"])
def test_too_old_a_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with patched(applied=False) as records:
        untouched()
    (text,) = records.texts
    assert text.startswith(f"ERROR kvrouter: vLLM {version} is too old")
    assert "hybrid KV cache manager off whenever KV events are on" in text


@pytest.mark.parametrize("version", [f"0.{NEWEST_KNOWN_VERSION[1] + 1}.0", "1.0.0", "0.1.dev17+gabc", "main"])
def test_an_unknown_version_is_tried(version: str, model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with patched() as records, WatchedOracle(GPU_SETS[0], model, Random(seed)) as oracle:
        oracle.work(20)
        oracle.drain()
        oracle.verify()
    (text,) = records.texts
    assert text.startswith("WARNING") and version in text


@pytest.mark.parametrize("version", [f"0.{OLDEST_VERSION[1]}.0", "0.32.0+cpu", "0.31.1.dev5+g1234"])
def test_a_known_version_is_patched_without_a_word(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with patched() as records:
        pass
    assert records.texts == []


def test_the_entry_point_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kv_events.EventPublisherFactory, "_registry", None)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    log = logging.getLogger(plugin.LOGGER)
    level = log.level
    log.setLevel(logging.WARNING)
    log.addHandler(handler)
    try:
        plugin.register()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert len(records) == 1 and "runs without it" in records[0].getMessage()


# Failures of ours: every hook and its feature


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("made up")


# For each name: where our code fails, which feature turns off, and which scope is withheld then.
FAILURES: dict[str, tuple[Any, str, str, Scope]] = {
    "queue": (publisher, "unblock", "queue", Scope.NOTHING),
    "catalog": (tap, "read_catalog", "catalog", Scope.NOTHING),
    "declare": (tap.EventTap, "learn_lora", "lora", Scope.NOTHING),
    "position of a store": (positions, "position_of", "positions", Scope.NOTHING),
    "a block announced again": (positions, "note", "reuse", Scope.EVERYTHING),
    "reset": (resets, "void", "resets", Scope.NOTHING),
    "offloaded": (tap.EventTap, "_taken", "offload", Scope.TIERS),
    "position of an offloaded block": (offloading, "hash_before", "offload_positions", Scope.NOTHING),
    "offload reset": (offloading.Offload, "_hold", "offload_resets", Scope.TIERS),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_costs_its_feature_and_no_request(
    name: str, model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, feature, scope = FAILURES[name]
    rng = Random(seed)
    monkeypatch.setattr(owner, attribute, fail)
    with patched() as records, WatchedOracle(OFFLOAD.group_set, model, rng, OFFLOAD.connector_config()) as oracle:
        work(oracle, rng)
        oracle.drain()
        states = oracle.peer.hello().features
        assert states[feature] != ON
        texts = [text for text in records.texts if f"kvrouter: {feature} " in text]
        assert len(texts) == 1 and FEATURES[feature] in texts[0]
        if name != "a block announced again":
            assert [other for other in states if states[other] != ON] == [feature]
            assert len(records.texts) == 1
        oracle.verify(scope)
        beat = oracle.beat()
        problem = f"{feature}: {FAILED}"
        assert beat.withheld == (problem if scope is Scope.EVERYTHING else "")
        assert beat.tiers_withheld == (problem if scope is Scope.TIERS else "")
        assert not beat.withheld or oracle.peer.hello().withheld == problem


# Failures after something was reported. For each name: where, which feature turns off, which scope is withheld.
LATE_FAILURES: dict[str, tuple[Any, str, str, Scope]] = {
    "reports": (tap.EventTap, "published", "reports", Scope.EVERYTHING),
    "a block announced again": (positions, "note", "reuse", Scope.EVERYTHING),
    "offloaded": (tap.EventTap, "_taken", "offload", Scope.TIERS),
    "offload reset": (offloading.Offload, "_hold", "offload_resets", Scope.TIERS),
}


@pytest.mark.parametrize("name", LATE_FAILURES)
def test_what_a_failed_feature_has_reported_is_taken_back(
    name: str, model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail after reports were sent, and check that readers hold only resident blocks, however the engine continues."""
    owner, attribute, feature, scope = LATE_FAILURES[name]
    rng = Random(seed)
    working, failing = getattr(owner, attribute), [False]

    def place(*args: Any, **kwargs: Any) -> Any:
        return fail() if failing[0] else working(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, place)
    announcing = {"kv_cache_report_mode": "full"}
    with patched(), WatchedOracle(OFFLOAD.group_set, model, rng, OFFLOAD.connector_config(), announcing) as oracle:
        oracle.work(60)
        oracle.drain()
        oracle.verify()
        assert {place[1] for place in oracle.copies} == {"GPU", "CPU"}
        failing[0] = True
        if feature == "offload_resets":
            assert oracle.scheduler.reset_prefix_cache(reset_connector=True)
        for go_on in (oracle.work, lambda rounds: work(oracle, rng), oracle.work):
            go_on(60)
            oracle.drain()
            oracle.verify(scope)
        assert oracle.peer.hello().features[feature] == FAILED


def test_a_host_pool_whose_resets_are_not_seen_is_withheld(
    model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail to see a reset, and check that the host pool is withheld.

    vLLM's own clear, which comes with the next step, names no medium and is taken for the GPU's.
    """
    rng = Random(seed)
    tree = PromptTree(rng, 512)

    def work_on() -> set[str]:
        """Send some more requests, and return the media that readers know of after them."""
        for _ in range(60):
            if oracle.unfinished < 4:
                oracle.submit(tree.request())
            oracle.step(tree)
        while oracle.unfinished:
            oracle.step(tree)
        # Let the connector's last transfers end.
        for _ in range(6):
            oracle.step(tree)
        last_reported(oracle)
        return {place.medium for place in reporter_of(oracle)._stream.ledger.places()}

    with patched():
        oracle = Oracle(SIMPLE.group_set, model, rng, SIMPLE.connector_config(), SIMPLE.CONNECTOR)
    try:
        assert work_on() == {"GPU", "CPU"}
        monkeypatch.setattr(resets, "void", fail)
        assert oracle.scheduler.reset_prefix_cache(reset_connector=True)
        assert work_on() == {"GPU"}
        assert reporter_of(oracle)._stream.tiers_withheld == f"resets: {FAILED}"
    finally:
        oracle.close()


def test_an_adapters_path_is_not_declared_once_it_may_have_changed(
    model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    with patched(), WatchedOracle(GPU_SETS[0], model, rng) as oracle:
        work(oracle, rng)
        declared = oracle.peer.hello().catalog
        assert declared is not None and declared.lora_paths
        monkeypatch.setattr(tap.EventTap, "learn_lora", fail)
        work(oracle, rng)
        eventually(lambda: oracle.peer.hello().catalog == msgspec.structs.replace(declared, lora_paths={}))


def test_a_failing_tap_leaves_a_publisher(model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "EventTap", fail)
    rng = Random(seed)
    with patched() as records:
        oracle = Oracle(OFFLOAD.group_set, model, rng, OFFLOAD.connector_config())
    try:
        work(oracle, rng)
        assert not hasattr(oracle.scheduler, ATTRIBUTE)
    finally:
        oracle.close()
    (text,) = records.texts
    assert "kvrouter: reports failed" in text


def test_a_scheduler_of_another_shape_runs(model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap.EventTap, "attach", fail)
    rng = Random(seed)
    with patched() as records:
        oracle = Oracle(OFFLOAD.group_set, model, rng, OFFLOAD.connector_config())
    try:
        work(oracle, rng)
    finally:
        oracle.close()
    assert len(records.texts) == 1 and "reports is off: unknown scheduler layout" in records.texts[0]


def test_a_taken_port_leaves_a_publisher(model: Path, seed: int) -> None:
    """Report nothing if the requests endpoint is taken, because readers look for it only there."""
    with patched():
        first = Oracle(GPU_SETS[0], model, Random(seed))
    taken = tap_of(first).reporter.requests_endpoint  # type: ignore[attr-defined]
    rng = Random(seed)
    with patched(ENVIRONMENT | {"KVROUTER_PATCH_REQUESTS": taken}) as records:
        second = Oracle(GPU_SETS[0], model, rng)
    try:
        work(second, rng)
        assert not hasattr(second.scheduler, ATTRIBUTE)
        (text,) = records.texts
        assert "kvrouter: reports is off: cannot listen on" in text and "KVROUTER_PATCH_REQUESTS" in text
    finally:
        first.close()
        second.close()


# Places that look different


def renamed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with other names of its parameters."""

    def other(self: Any, first: Any = None, *rest: Any, **kwargs: Any) -> Any:
        return stock(self, *(() if first is None else (first,)), *rest, **kwargs)

    return other


# By name: the owner of the method, the method, and the feature that is lost.
PLACES_CHANGED: dict[str, tuple[Any, str, str]] = {
    "cache_full_blocks": (BlockPool, "cache_full_blocks", "positions"),
    "cache_partial_block": (BlockPool, "cache_partial_block", "positions"),
    "add_request": (Scheduler, "add_request", "lora"),
    "publish": (ZmqEventPublisher, "publish", "reports"),
    "record_store": (OffloadingEventsTracker, "record_store", "offload_positions"),
    "add_lora": (core.EngineCore, "add_lora", "lora"),
}


@pytest.mark.parametrize("name", PLACES_CHANGED)
def test_a_place_with_other_parameters_is_left_alone(
    name: str, model: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, feature = PLACES_CHANGED[name]
    rng = Random(seed)
    monkeypatch.setattr(owner, attribute, renamed(getattr(owner, attribute)))
    with patched() as records:
        oracle = Oracle(OFFLOAD.group_set, model, rng, OFFLOAD.connector_config())
        changed = getattr(owner, attribute)
        assert not hasattr(changed, ORIGINAL)
    try:
        work(oracle, rng)
    finally:
        oracle.close()
    (text,) = records.texts
    assert text.startswith(f"WARNING kvrouter: {feature} is off: ")
    assert attribute in text and FEATURES[feature] in text


def test_another_queue_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a publisher with another class of queue its own queue."""

    class Own(queue.Queue[Any]):
        pass

    class Other(ZmqEventPublisher):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._event_queue = Own()

    monkeypatch.setitem(EventPublisherFactory._registry, "zmq", Other)
    with patched() as records:
        event_publisher: Any = EventPublisherFactory.create(
            kv_events.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:0"), 0
        )
    event_publisher.shutdown()
    assert type(event_publisher._event_queue) is Own
    (text,) = records.texts
    assert text.startswith("WARNING kvrouter: queue is off: ") and "_event_queue" in text
