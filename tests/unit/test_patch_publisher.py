# SPDX-License-Identifier: Apache-2.0
"""The queue that drops, the seqs that it skips, and the endpoints of the patch, without vLLM."""

from __future__ import annotations

import queue
import threading
from random import Random
from typing import Any

import pytest

from kvrouter.engine_patch.hooks.publisher import DroppingQueue, Seqs
from kvrouter.engine_patch.setup.endpoints import Endpoints, binds, choose, of_rank


def test_a_full_queue_drops_and_skips_at_the_place_of_the_loss() -> None:
    """Put and get at random beside a list: each item that comes out has the number with which it was put."""
    rng = Random(7)
    for _ in range(200):
        seqs = Seqs()
        size = rng.randint(1, 4)
        items = DroppingQueue(size, seqs)
        queued: list[int] = []
        put = dropped = 0
        for _ in range(60):
            if rng.random() < 0.6:
                if len(queued) < size:
                    queued.append(put)
                else:
                    dropped += 1
                items.put(put)
                put += 1
            elif queued:
                assert items.get_nowait() == queued[0] == next(seqs)
                items.task_done()
                del queued[0]
            assert items.qsize() == len(queued) and items.dropped == dropped
        assert items.unfinished_tasks == len(queued)


def test_the_sentinel_is_always_taken() -> None:
    items = DroppingQueue(1, Seqs())
    items.put("a")
    items.put("b")
    items.put_nowait(None)
    assert [items.get_nowait(), items.get_nowait()] == ["a", None]


def test_a_size_of_zero_has_no_bound() -> None:
    items = DroppingQueue(0, Seqs())
    for number in range(1000):
        items.put(number)
    assert items.qsize() == 1000 and items.dropped == 0


def test_a_waiting_reader_is_woken() -> None:
    items: Any = DroppingQueue(1, Seqs())
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.append(items.get(timeout=30)))
    reader.start()
    items.put("a")
    reader.join(30)
    assert received == ["a"]
    with pytest.raises(queue.Empty):
        items.get(timeout=0.001)


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/x", True),
        ("inproc://x", True),
        ("tcp://h:1", False),
    ],
)
def test_the_endpoints_that_vllm_binds_are_recognised(endpoint: str, bound: bool) -> None:
    assert binds(endpoint) is bound


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:15557", 0, "tcp://*:15557"),
        ("tcp://*:15557", 3, "tcp://*:15560"),
        ("tcp://[::1]:15557", 1, "tcp://[::1]:15558"),
        ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0"),
        ("ipc:///run/x", 2, "ipc:///run/x_dp2"),
        ("inproc://x", 1, "inproc://x_dp1"),
    ],
)
def test_every_rank_has_its_own_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert of_rank(endpoint, rank) == expected


def test_the_patch_listens_beside_the_engines_endpoint() -> None:
    """The endpoint that vLLM bound already includes the offset of the rank."""
    assert choose("tcp://*:5557", "tcp://*:5559", 2, None, None) == Endpoints("tcp://*:15559", "tcp://*:16559")
    assert choose("tcp://*:0", "tcp://10.0.0.1:40001", 0, None, None) == Endpoints(
        "tcp://10.0.0.1:50001", "tcp://10.0.0.1:51001"
    )


def test_the_patch_listens_where_the_user_says() -> None:
    assert choose("tcp://h:1", "tcp://h:3", 2, "tcp://*:7000", "ipc:///r") == Endpoints("tcp://*:7002", "ipc:///r_dp2")
    assert choose("tcp://*:5557", "tcp://*:5557", 0, None, "tcp://*:9") == Endpoints("tcp://*:15557", "tcp://*:9")


@pytest.mark.parametrize(
    ("configured", "bound", "requests", "word"),
    [
        ("tcp://host:5557", "tcp://host:5557", None, "connected to"),
        ("tcp://host:5557", "tcp://host:5557", "tcp://*:1", "connected to"),
        ("tcp://*:x", "tcp://*:x", None, "has no port"),
    ],
)
def test_an_endpoint_without_a_place_to_listen_says_why(
    configured: str, bound: str, requests: str | None, word: str
) -> None:
    why = choose(configured, bound, 0, requests, None)
    assert isinstance(why, str)
    assert word in why and "KVROUTER_PATCH_REQUESTS" in why and "KVROUTER_PATCH_REPORTS" in why
