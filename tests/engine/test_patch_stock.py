# SPDX-License-Identifier: Apache-2.0
"""vLLM's own topic and replay are those of an unpatched engine, byte for byte, and a full queue no longer blocks."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, EventPublisherFactory, KVEventBatch
from vllm.v1.core.sched import scheduler

from kvrouter.engine_patch.hooks.publisher import ATTRIBUTE, DroppingQueue
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, GroupSet, OffloadSet
from tests.engine.oracle import Oracle
from tests.engine.patched import ENVIRONMENT, StockTopic, patched
from tests.engine.workload import PromptTree
from tests.support.report_peer import eventually

pytestmark = pytest.mark.engine

STEPS = 150


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all batches the same time, because each batch carries the time at which it was made."""
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(time=lambda: 1.0, monotonic=time.monotonic))


def run(group_set: GroupSet, model: Path, seed: int, offload: OffloadSet | None, patch: bool) -> Any:
    """Return the frames of the engine's topic, the frames of its replay, and the tokens of each request."""
    rng = Random(seed)
    with patched() if patch else nullcontext():
        oracle = Oracle(group_set, model, rng, None if offload is None else offload.connector_config())
    assert hasattr(oracle.scheduler, ATTRIBUTE) is patch
    topic = StockTopic(oracle.endpoint, oracle.replay_endpoint)
    tree = PromptTree(rng, 512)
    requests: list[Any] = []
    make, model_run = oracle._request, oracle._run_model

    def request(*args: Any) -> Any:
        vllm_request = make(*args)
        # Blocks that are announced twice must not change either.
        if len(requests) % 7 == 0:
            vllm_request.kv_cache_report_mode = "full"
        requests.append(vllm_request)
        return vllm_request

    def run_model(output: Any) -> Any:
        # Reset in the middle of a step, when evictions of the CPU tier are noted but not yet taken.
        if offload is not None and len(requests) % 20 == 11:
            oracle.scheduler.reset_connector_cache()
        return model_run(output)

    oracle._request, oracle._run_model = request, run_model  # type: ignore[assignment, method-assign]
    try:
        for i in range(STEPS):
            if oracle.unfinished < 5:
                oracle.submit(tree.request())
            oracle.step(tree)
            if i % 50 == 49:
                while oracle.unfinished:
                    oracle.step(tree)
                oracle.scheduler.reset_prefix_cache(reset_connector=i % 100 == 49)
        replay = topic.replay(oracle.last_seq)
        return topic.live(), replay, [list(made.all_token_ids) for made in requests]
    finally:
        topic.close()
        oracle.close()


NAMES = ("full", "3-way", "full 16+mamba 64, partial hits", "eagle full, window flagged")
SETS = [(group_set, None) for group_set in GPU_SETS if group_set.name in NAMES] + [
    (offload_set.group_set, offload_set) for offload_set in OFFLOAD_SETS if "full," in offload_set.name
]


@pytest.mark.parametrize(("group_set", "offload"), SETS, ids=lambda item: getattr(item, "name", "gpu"))
@pytest.mark.usefixtures("frozen")
def test_the_same_bytes(group_set: GroupSet, offload: OffloadSet | None, model: Path, seed: int) -> None:
    plain_live, plain_replay, plain_tokens = run(group_set, model, seed, offload, patch=False)
    live, replay, tokens = run(group_set, model, seed, offload, patch=True)
    assert tokens == plain_tokens
    assert replay == plain_replay
    assert len(replay) > STEPS // 2
    # The live subscriber may join late; from then on it gets the replay's frames.
    for received, all_frames in ((live, replay), (plain_live, plain_replay)):
        assert received
        assert received == [frames[1:] for frames in all_frames[-1 - len(received) : -1]]


# The queue


def publisher_of(max_queue_size: int) -> Any:
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint="tcp://*:0",
        replay_endpoint="tcp://*:0",
        max_queue_size=max_queue_size,
    )
    return EventPublisherFactory.create(config, 0)


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(ts=float(number), events=[BlockRemoved(block_hashes=[number], medium="GPU", group_idx=0)])


class Stuck:
    """A PUB socket whose `send_multipart` waits until `go_on` is set."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.entered, self.go_on = threading.Event(), threading.Event()

    def send_multipart(self, frames: Any) -> None:
        self.entered.set()
        assert self.go_on.wait(30)
        self._socket.send_multipart(frames)

    def close(self, linger: int) -> None:
        self._socket.close(linger)


def test_a_full_queue_drops_and_marks_the_gap() -> None:
    """Publish while the publisher's thread is stuck: the dropped batches are missing in the seqs, at their places."""
    with patched():
        publisher = publisher_of(4)
    topic = StockTopic(publisher._endpoint, publisher._replay_endpoint)
    stuck = publisher._pub = Stuck(publisher._pub)
    try:
        publisher.publish(batch(0))
        assert stuck.entered.wait(30)
        for number in range(1, 20):  # 1 to 4 wait, 5 to 19 do not fit
            publisher.publish(batch(number))
        assert publisher._event_queue.dropped == 15
        stuck.go_on.set()
        eventually(publisher._event_queue.empty)
        publisher.publish(batch(20))
        publisher.publish(batch(21))
        replay = topic.replay(21)
        seqs = [int.from_bytes(frames[2], "big") for frames in replay[:-1]]
        assert seqs == [0, 1, 2, 3, 4, 20, 21]
        # Each seq stands before its own batch.
        assert [frames[3] for frames in replay[:-1]] == [publisher._pack.encode(with_rank(batch(n))) for n in seqs]
    finally:
        topic.close()
        publisher.shutdown()


def with_rank(made: KVEventBatch) -> KVEventBatch:
    made.data_parallel_rank = 0
    return made


def test_a_full_queue_can_be_shut_down() -> None:
    with patched():
        publisher = publisher_of(2)
    stuck = publisher._pub = Stuck(publisher._pub)
    for number in range(5):
        publisher.publish(batch(number))
    stuck.go_on.set()
    publisher.shutdown()
    assert not publisher._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(batch(6))


def test_nothing_is_lost_while_the_queue_is_exchanged() -> None:
    """Exchange the queue while the publisher's thread may be waiting for the queue that it was started with."""
    with patched(), ExitStack() as stack:
        for _ in range(10):
            publisher = publisher_of(0)
            stack.callback(publisher.shutdown)
            for number in range(3):
                publisher.publish(batch(number))
            topic = StockTopic(publisher._endpoint, publisher._replay_endpoint)
            stack.callback(topic.close)
            assert [int.from_bytes(frames[2], "big") for frames in topic.replay(2)[:-1]] == [0, 1, 2]


def test_without_a_place_to_listen_the_queue_still_drops() -> None:
    """Use an event endpoint that vLLM connects to, so that there is no port of its own to listen beside."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("KVROUTER_PATCH_REQUESTS",)}
    with patched(environment) as records:
        config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:1")
        publisher = EventPublisherFactory.create(config, 0)
    try:
        assert isinstance(publisher._event_queue, DroppingQueue)
        assert getattr(publisher, ATTRIBUTE) is None
        assert len(records.texts) == 1 and "set KVROUTER_PATCH_REQUESTS" in records.texts[0]
    finally:
        publisher.shutdown()
