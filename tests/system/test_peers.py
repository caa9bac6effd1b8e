# SPDX-License-Identifier: Apache-2.0
"""Cases that other routers were measured to get wrong, each through the whole router: socket, Redis, HTTP."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.fake_engine import FULL, MAMBA, SLIDING, FakeEngine, hashes, placeholder, prompt, removed, stored
from tests.support.fleet import until
from tests.support.router_process import RouterProcess

TOKENS = prompt(1)
CHAIN = hashes(TOKENS)

_models = itertools.count()


class Fleet:
    """Workers of one fresh model, queried together."""

    def __init__(
        self, router: RouterProcess, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine]
    ) -> None:
        self.router = router
        self.model = f"model-{next(_models)}"
        self._context = context
        self._engines = engines

    def add(self, worker_id: str, **options: Any) -> FakeEngine:
        engine = FakeEngine(self._context, **options)
        self._engines.append(engine)
        engine.join(self.router, worker_id, self.model)
        return engine

    def seen(self, worker_id: str, seq: int) -> dict[str, Any]:
        return self.router.wait_seen(worker_id, seq)

    def ask(self, tokens: list[int] = TOKENS, **fields: Any) -> dict[str, int]:
        answer = self.router.request("POST", "/query", {"model": self.model, "token_ids": tokens, **fields})
        return {worker: row["longest_matched"] for worker, row in answer["instances"].items()}

    def chosen(self, tokens: list[int] = TOKENS) -> str:
        return str(self.router.request("POST", "/select", {"model": self.model, "token_ids": tokens})["worker_id"])

    def row(self, worker_id: str) -> dict[str, Any]:
        return self.router.worker(worker_id)


@pytest.fixture
def fleet(
    router: RouterProcess,
    context: zmq.Context[zmq.Socket[bytes]],
    engines: list[FakeEngine],
    request: pytest.FixtureRequest,
) -> Any:
    fleet = Fleet(router, context, engines)
    yield fleet
    for row in router.request("GET", "/workers")["workers"]:
        router.unregister(row["worker_id"])


def test_sliding_window_evicted_is_worth_nothing(fleet: Fleet) -> None:
    rich, poor = fleet.add("w1"), fleet.add("w2")
    rich.publish(stored(TOKENS, 0, 12), stored(TOKENS, 0, 12, 1, **SLIDING))
    fleet.seen("w1", rich.publish(*removed(CHAIN, 1)))
    fleet.seen("w2", poor.publish(stored(TOKENS, 0, 6), stored(TOKENS, 0, 6, 1, **SLIDING)))
    assert fleet.ask() == {"w1": 0, "w2": 96}
    assert fleet.chosen() == "w2"


def test_mamba_state_missing_is_worth_nothing(fleet: Fleet) -> None:
    rich, poor = fleet.add("w1"), fleet.add("w2")
    fleet.seen("w1", rich.publish(stored(TOKENS, 0, 12), stored(TOKENS, 0, 12, 1, **(MAMBA | {"block_hashes": []}))))
    fleet.seen("w2", poor.publish(stored(TOKENS, 0, 6), stored(TOKENS, 5, 6, 1, **MAMBA)))
    assert fleet.ask() == {"w1": 0, "w2": 96}
    assert fleet.chosen() == "w2"


def test_full_attention_is_known_by_its_kind_and_not_by_index_0(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    fleet.seen("w1", engine.publish(stored(TOKENS, 8, 12, 0, **SLIDING), stored(TOKENS, 0, 12, 1, **FULL)))
    assert fleet.ask() == {"w1": 192}


def test_cpu_events_without_tokens_count(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    engine.publish(stored(TOKENS, 0, 4))
    fleet.seen("w1", engine.publish(*(placeholder(block_hash) for block_hash in CHAIN[:9])))
    answer = fleet.router.request("POST", "/query", {"model": fleet.model, "token_ids": TOKENS})["instances"]["w1"]
    assert (answer["gpu"], answer["cpu"], answer["disk"]) == (64, 144, 144)
    assert answer["dp"] == {"0": 144}
    fleet.seen("w1", engine.publish(*removed(CHAIN[4:5], medium="CPU")))
    assert fleet.ask() == {"w1": 64}


def test_an_unknown_field_is_ignored(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    event = msgspec.to_builtins(stored(TOKENS, 0, 12)) | {"type": "BlockStored", "colour": {"deep": [1, None]}}
    fleet.seen("w1", engine.publish_raw(msgspec.msgpack.encode([time.time(), [event], 0])))
    assert fleet.ask() == {"w1": 192}


def test_a_salt_belongs_to_the_prefix(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    fleet.seen("w1", engine.publish(stored(TOKENS, 0, 12, cache_salt="tenant")))
    assert fleet.ask() == {"w1": 0}
    assert fleet.ask(cache_salt="other") == {"w1": 0}
    assert fleet.ask(cache_salt="tenant") == {"w1": 192}


def test_a_gap_that_nothing_fills_withdraws_what_was_before_it(fleet: Fleet) -> None:
    engine = fleet.add("w1", replay=False)
    fleet.seen("w1", engine.publish(stored(TOKENS, 0, 12)))
    assert fleet.ask() == {"w1": 192}
    engine.publisher.skip_seq(5)
    other = prompt(2)
    row = fleet.seen("w1", engine.publish(stored(other, 0, 3)))
    assert fleet.ask() == {"w1": 0} and fleet.ask(other) == {"w1": 48}
    assert row["gaps"] == 1 and "lost" in row["reason"]


def test_a_gap_is_filled_from_the_replay_endpoint(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    fleet.seen("w1", engine.publish(stored(TOKENS, 0, 6)))
    engine.publisher.drop_next(1)
    engine.publish(stored(TOKENS, 6, 12))
    fleet.seen("w1", engine.publish(stored(prompt(3), 0, 3)))
    assert fleet.ask() == {"w1": 192}
    row = fleet.row("w1")
    assert (row["gaps"], row["recovery"]["missed_batches"], row["recovery"]["replays"]) == (1, 1, 1)


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_restart_voids_what_it_held(fleet: Fleet, replay: bool) -> None:
    engine = fleet.add("w1", replay=replay)
    engine.publish(stored(TOKENS, 0, 6))
    before = fleet.seen("w1", engine.publish(stored(TOKENS, 6, 12)))
    assert fleet.ask() == {"w1": 192}
    engine.restart()
    if not replay:
        # Nothing shows that the new life began until the engine publishes; meanwhile the lost connection is shown.
        fleet.router.wait_row("w1", lambda row: row["state"] == "suspect")
        engine.wait_subscribed()
    other = prompt(4)
    engine.publish(stored(other, 0, 3))
    after = fleet.router.wait_row("w1", lambda row: row["epoch"] != before["epoch"] and row["seq"] == 0)
    assert after["state"] == "live"
    assert fleet.ask() == {"w1": 0} and fleet.ask(other) == {"w1": 48}


@pytest.mark.parametrize("layout", ["map", "array"])
@pytest.mark.parametrize("hash_form", ["bytes32", "bytes16"])
def test_byte_hashes_are_accepted(fleet: Fleet, layout: str, hash_form: str) -> None:
    engine = fleet.add("w1")
    fleet.seen("w1", engine.publish(stored(TOKENS, 0, 12), layout=layout, hash_form=hash_form))
    assert fleet.ask() == {"w1": 192}


def test_stored_twice_removed_once_is_still_there(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    engine.publish(stored(TOKENS, 0, 12))
    engine.publish(stored(TOKENS, 0, 12))
    fleet.seen("w1", engine.publish(*removed(CHAIN)))
    assert fleet.ask() == {"w1": 192}
    fleet.seen("w1", engine.publish(*removed(CHAIN[11:])))
    assert fleet.ask() == {"w1": 176}


def test_a_store_whose_parent_is_unknown_counts_once_its_prefix_is_there(fleet: Fleet) -> None:
    engine = fleet.add("w1", replay=False)
    fleet.seen("w1", engine.publish(stored(TOKENS, 6, 12)))
    assert fleet.ask() == {"w1": 0}
    fleet.seen("w1", engine.publish(stored(TOKENS, 0, 6)))
    assert fleet.ask() == {"w1": 192}


def test_a_middle_block_removed_and_stored_again_heals_the_chain(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    engine.publish(stored(TOKENS, 0, 12))
    fleet.seen("w1", engine.publish(*removed(CHAIN[5:6])))
    assert fleet.ask() == {"w1": 80}
    fleet.seen("w1", engine.publish(stored(TOKENS, 5, 6)))
    assert fleet.ask() == {"w1": 192}


def test_media_without_credit_are_named_and_visible(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    engine.publish(stored(TOKENS, 0, 2))
    row = fleet.seen("w1", engine.publish(*(placeholder(h, medium=m) for m in ("FS", "OBJ", "moon") for h in CHAIN)))
    assert row["residency"] == {"g0:FS": 12, "g0:GPU": 2, "g0:MOON": 12, "g0:OBJ": 12}
    assert fleet.ask() == {"w1": 32}


def test_one_workers_removal_leaves_the_others_alone(fleet: Fleet) -> None:
    first, second = fleet.add("w1"), fleet.add("w2")
    fleet.seen("w1", first.publish(stored(TOKENS, 0, 12)))
    fleet.seen("w2", second.publish(stored(TOKENS, 0, 12)))
    fleet.seen("w1", first.publish(*removed(CHAIN)))
    assert fleet.ask() == {"w1": 0, "w2": 192}


def test_ties_do_not_always_go_to_the_first_worker(fleet: Fleet) -> None:
    for worker_id in ("w1", "w2", "w3"):
        fleet.add(worker_id)
    # Each prompt differs, because a prompt that a worker is just computing goes to that worker.
    assert {fleet.chosen([number, *TOKENS]) for number in range(60)} == {"w1", "w2", "w3"}


def test_a_wrong_seed_is_not_silent(fleet: Fleet) -> None:
    engine = fleet.add("w1")
    chain = [block_hash ^ 0xFF for block_hash in CHAIN]
    fleet.seen("w1", engine.publish(stored(TOKENS, 0, 12, chain=chain)))
    # It may still be catching up in the moment in which the batch is seen.
    row = until(lambda: (row := fleet.row("w1"))["state"] == "unhashable" and row, "it is unhashable")
    assert "none_hash" in row["reason"]
    health = fleet.router.request("GET", "/health")
    assert health["status"] == "degraded" and any("unhashable" in reason for reason in health["reasons"])
    assert fleet.ask() == {"w1": 0}
    assert fleet.chosen() == "w1"
