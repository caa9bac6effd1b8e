# SPDX-License-Identifier: Apache-2.0
"""Pods as workers: a pod's address, ports and role, and whether it takes requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.follow.discovery.kubernetes.pods import Pod, candidates_of
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.model.workers.source_precedence import KUBERNETES
from tests.support.fake_cluster import pod


def candidates(*args: Any, **given: Any) -> list[Candidate]:
    return candidates_of(msgspec.json.decode(json.dumps(pod(*args, **given)).encode(), type=Pod))


def only(*args: Any, **given: Any) -> Candidate:
    (candidate,) = candidates(*args, **given)
    return candidate


def test_a_bare_pod_is_its_address_and_the_engine_tells_the_rest() -> None:
    assert only("e-0") == Candidate(
        Registration(WorkerKey("", "e-0"), url="http://10.0.0.5:8000", source=KUBERNETES),
        any_rank=True,
        fallback=Stream("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558"),
    )


def test_labels_and_annotations_describe_the_worker() -> None:
    candidate = only(
        "e-0",
        labels={"kvrouter/role": "decode", "kvrouter/model": "label"},
        annotations={
            "kvrouter/model": "google/gemma-3-27b-it",
            "kvrouter/handover": "header",
            "kvrouter/port": "9000",
            "kvrouter/peer-port": "5710",
        },
        ports={"http": 8080, "kv-events": 6000, "kv-replay": 6001, "metrics": 1},
    ).registration
    assert candidate == Registration(
        WorkerKey("google/gemma-3-27b-it", "e-0"),
        url="http://10.0.0.5:9000",
        events="tcp://10.0.0.5:6000",
        replay="tcp://10.0.0.5:6001",
        role=Role.DECODE,
        handover=HandoverWay.HEADER,
        peer="10.0.0.5:5710",
        source=KUBERNETES,
    )
    assert only("e-0", ports={"http": 8080}).registration.url == "http://10.0.0.5:8080"


def test_an_ipv6_pod_stands_in_brackets() -> None:
    registration = only("e-0", "fd00::5", ports={"kv-events": 5557, "kv-replay": 5558}).registration
    assert (registration.url, registration.events, registration.replay) == (
        "http://[fd00::5]:8000",
        "tcp://[fd00::5]:5557",
        "tcp://[fd00::5]:5558",
    )


def test_ranks_have_ports_of_their_own() -> None:
    ranks = candidates("e-0", annotations={"kvrouter/dp-ranks": "2", "kvrouter/events-port": "6000"})
    assert [(candidate.registration.worker.dp_rank, candidate.registration.events) for candidate in ranks] == [
        (0, "tcp://10.0.0.5:6000"),
        (1, "tcp://10.0.0.5:6001"),
    ]
    second = candidates("e-0", annotations={"kvrouter/dp-ranks": "2"})[1]
    assert second.fallback == Stream("tcp://10.0.0.5:5558", "tcp://10.0.0.5:5559")


@pytest.mark.parametrize(
    ("given", "note"), [({"terminating": True}, "its pod is terminating"), ({"ready": False}, "its pod is not ready")]
)
def test_a_pod_that_takes_no_request_retires_a_known_worker(given: dict[str, Any], note: str) -> None:
    candidate = only("e-0", **given)
    assert candidate.only_known and candidate.registration.retiring and candidate.registration.note == note


def test_a_pod_without_an_address_or_at_its_end_is_no_worker() -> None:
    assert candidates("e-0", None) == []
    assert candidates("e-0", phase="Succeeded") == candidates("e-0", phase="Failed") == []


def test_on_the_hosts_network_no_port_is_guessed() -> None:
    assert only("e-0", hostNetwork=True).fallback is None


@pytest.mark.parametrize(
    "annotations",
    [
        {"kvrouter/port": "http"},
        {"kvrouter/events-port": "70000"},
        {"kvrouter/dp-ranks": "0"},
        {"kvrouter/role": "router"},
        {"kvrouter/model": " "},
        {"kvrouter/handover": "mail"},
        {"kvrouter/peer-port": "70000"},
    ],
)
def test_a_wrong_annotation_is_named_with_its_pod(annotations: dict[str, str]) -> None:
    candidate = only("e-0", annotations=annotations)
    (name,) = annotations
    assert candidate.problem.startswith(f"pod e-0: {name} ")


def test_an_invalid_address_is_refused() -> None:
    assert only("e-0", "127.0.0.1/../x").problem
    assert "must not end in '@1'" in only("e@1").problem
