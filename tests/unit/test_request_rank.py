# SPDX-License-Identifier: Apache-2.0
"""The number that a request names for each rank behind an address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.request_rank import request_ranks

URL = "http://10.0.0.1:8000"


def stream_of(rank: int) -> Stream:
    return Stream(f"tcp://10.0.0.1:{5557 + rank}")


def registered(rank: int, follows: int | None = None, model: str = "m", url: str = URL) -> Registration:
    """Return a worker that follows the event stream of the rank `follows`, or a stream that its engine does not name."""
    events = "tcp://10.0.0.1:15557" if follows is None else stream_of(follows).events
    return Registration(WorkerKey(model, "w", rank), url=url, events=events)


@pytest.mark.parametrize(
    ("workers", "engine", "expected"),
    [
        ([registered(0, 0), registered(1, 1)], (0, 1), [0, 1]),
        # vLLM's --data-parallel-start-rank 8: registered by address, which names the ranks among all peers.
        ([registered(8, 8), registered(9, 9)], (8, 9), [0, 1]),
        # The same, registered by hand by their places.
        ([registered(0, 8), registered(1, 9)], (8, 9), [0, 1]),
        # The same behind mapped ports.
        ([registered(8), registered(9)], (8, 9), [0, 1]),
        ([registered(0), registered(1)], (8, 9), [0, 1]),
        # The numbers alone do not say that these are the first and the second core of 1 and 2.
        ([registered(0), registered(1)], (1, 2), [0, 1]),
        ([registered(1, 2), registered(2, 3)], (1, 2, 3), [1, 2]),
        # Some of the engine's ranks.
        ([registered(9, 9), registered(10, 10)], (8, 9, 10), [1, 2]),
        ([registered(1), registered(2)], (0, 1, 2), [1, 2]),
        # An engine that names no streams, such as vLLM before 0.31.
        ([registered(4), registered(5)], (), [0, 1]),
        ([registered(0), registered(2)], (), [0, 2]),
    ],
)
def test_a_request_names_the_place_of_a_rank_behind_its_address(
    workers: Sequence[Registration], engine: Sequence[int], expected: Sequence[int]
) -> None:
    sources: Mapping[str, Mapping[int, Stream]] = {URL: {rank: stream_of(rank) for rank in engine}}
    assert request_ranks(workers, sources) == dict(
        zip([registration.worker for registration in workers], expected, strict=True)
    )


def test_the_only_rank_of_a_model_behind_an_address_is_not_named() -> None:
    other_url = "http://10.0.0.2:8000"
    # Two models of one engine are not two ranks.
    workers = [registered(3), registered(3, model="alias"), registered(4, url=other_url)]
    assert request_ranks(workers, {URL: {3: stream_of(3)}, other_url: {4: stream_of(4)}}) == {}
