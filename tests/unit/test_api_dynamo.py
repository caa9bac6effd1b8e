# SPDX-License-Identifier: Apache-2.0
"""Dynamo's fields of a worker, translated into the router's fields."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.contract.registrations import RegisterBody, WorkerPatch
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.workers.registration_from_body import registration_of
from kvrouter.router.serve.api.dynamo_shapes import patch_in, registrations_in

URL = "http://h:8000"


def registered(**body: Any) -> list[Any]:
    return [
        registration_of(entry) for entry in registrations_in(msgspec.convert({"worker_id": 7} | body, RegisterBody))
    ]


def test_an_http_endpoint_is_the_url_and_the_events_stand_beside_it() -> None:
    (registration,) = registered(
        model_name="m", endpoint=URL, kv_events_endpoint="tcp://h:5557", replay_endpoint="tcp://h:5558", block_size=16
    )
    assert (registration.worker.model, registration.worker.worker_id, registration.worker.dp_rank) == ("m", "7", 0)
    assert (registration.url, registration.events, registration.replay, registration.block_size) == (
        URL,
        "tcp://h:5557",
        "tcp://h:5558",
        16,
    )
    assert registration.given_id == 7


def test_an_id_beyond_64_bits_is_returned_as_text() -> None:
    for worker_id, back in ((2**64 - 1, 2**64 - 1), (0, 0), (2**64, str(2**64)), (-1, "-1"), ("7", "7")):
        (registration,) = registered(worker_id=worker_id, model="m", endpoint="tcp://h:1")
        assert registration.given_id == back


def test_a_registration_in_our_form_is_unchanged() -> None:
    (registration,) = registered(model="m", endpoint="tcp://h:5557", url=URL)
    assert (registration.url, registration.events) == (URL, "tcp://h:5557")
    with pytest.raises(BadQuestion, match="model"):
        registered(endpoint="tcp://h:5557")


def test_a_model_that_is_not_named_is_the_default_one() -> None:
    (registration,) = registered(endpoint=URL)
    assert (registration.worker.model, registration.events) == ("default", None)


def test_each_rank_has_its_own_stream_and_no_rank_the_replay_of_another() -> None:
    ranks = registered(
        model="m",
        endpoint=URL,
        kv_events_endpoints={"4": "tcp://h:1", "5": "tcp://h:2"},
        data_parallel_start_rank=4,
        data_parallel_size=2,
        replay_endpoint="tcp://h:9",
    )
    assert [
        (registration.worker.dp_rank, registration.events, registration.replay, registration.url)
        for registration in ranks
    ] == [
        (4, "tcp://h:1", None, URL),
        (5, "tcp://h:2", None, URL),
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"routing_group": "acme"}, "routing_group"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"data_parallel_size": 100_000}, "data_parallel_size"),
        ({"data_parallel_start_rank": -1}, "data_parallel_start_rank"),
        ({"data_parallel_size": 2, "kv_events_endpoint": "tcp://h:1"}, "kv_events_endpoints"),
        ({"kv_events_endpoints": {"3": "tcp://h:1"}}, "none of the ranks"),
        ({"kv_events_endpoint": "http://h:1"}, "endpoint"),
    ],
)
def test_a_contradictory_registration_is_refused(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadQuestion, match=said):
        registered(model="m", endpoint=URL, **body)


def test_null_keeps_in_a_patch_of_theirs_and_unsets_in_one_of_ours() -> None:
    fields = {"endpoint": URL, "kv_events_endpoint": None, "replay_endpoint": None, "block_size": None}
    theirs = patch_in(msgspec.convert(fields, WorkerPatch))
    assert (theirs.url, theirs.endpoint, theirs.replay_endpoint, theirs.block_size) == (URL, *[msgspec.UNSET] * 3)
    moved = patch_in(msgspec.convert({"kv_events_endpoint": "tcp://h:2", "endpoint": None}, WorkerPatch))
    assert (moved.endpoint, moved.url) == ("tcp://h:2", msgspec.UNSET)
    ours = patch_in(msgspec.convert({"replay_endpoint": None}, WorkerPatch))
    assert ours.replay_endpoint is None and ours.endpoint is msgspec.UNSET
    with pytest.raises(BadQuestion, match="DELETE"):
        patch_in(msgspec.convert({"data_parallel_size": 2}, WorkerPatch))
