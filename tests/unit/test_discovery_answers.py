# SPDX-License-Identifier: Apache-2.0
"""Engines' answers about themselves, and the registrations of workers that they complete."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvrouter.contract.registrations import RegisterBody, WorkerPatch
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.discovery.candidate import Candidate, candidate_of, completed, ranked
from kvrouter.router.follow.discovery.files.workers_file import parse_workers
from kvrouter.router.index.store.registry import decode
from kvrouter.router.model.engines.vllm.description import streams_in
from kvrouter.router.model.workers.engine_answers import EngineAnswers, Stream, model_in
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.registration_from_body import patched, registration_of
from kvrouter.router.model.workers.source_precedence import STATIC
from kvrouter.router.serve.api.dynamo_shapes import registrations_in


def config(**given: Any) -> dict[str, Any]:
    """Return vLLM 0.32's KVEventsConfig as its HTTP endpoint shows it."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    } | given


def answers_of(url: str = "http://10.0.0.5:8000", **by_rank: dict[str, Any]) -> EngineAnswers:
    return streams_in(
        json.dumps({rank.removeprefix("r"): settings for rank, settings in by_rank.items()}).encode(), url
    )


@pytest.mark.parametrize(
    ("url", "endpoint", "events"),
    [
        ("http://10.0.0.5:8000", "tcp://*:5557", "tcp://10.0.0.5:5557"),
        ("http://engine.example:8000", "tcp://0.0.0.0:5557", "tcp://engine.example:5557"),
        ("http://[fd00::5]:8000", "tcp://[::]:5557", "tcp://[fd00::5]:5557"),
        # The engine chose this port itself, so it names its own address.
        ("http://engine:8000", "tcp://10.0.0.9:41234", "tcp://10.0.0.9:41234"),
        ("http://127.0.0.1:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("http://localhost:8000", "ipc:///run/kv.sock", "ipc:///run/kv.sock"),
        # The engine connects to this address and listens nowhere, so a listener on this port of its host is another
        # engine.
        ("http://10.0.0.5:8000", "tcp://collector:5557", None),
        ("http://10.0.0.5:8000", "tcp://127.0.0.1:5557", None),
        ("http://10.0.0.5:8000", "ipc:///run/kv.sock", None),
        ("http://10.0.0.5:8000", "inproc://kv", None),
        ("http://10.0.0.5:8000", "tcp://*:0x", None),
        ("http://10.0.0.5:8000", "", None),
    ],
)
def test_an_engines_endpoints_are_translated_to_this_host(url: str, endpoint: str, events: str | None) -> None:
    answers = answers_of(url, r0=config(endpoint=endpoint))
    assert answers.streams == ({} if events is None else {0: Stream(events)})
    assert bool(answers.problem) == (events is None)


def test_a_replay_endpoint_is_bound_so_a_name_in_it_is_the_engines() -> None:
    answers = answers_of("http://10.0.0.5:8000", r0=config(replay_endpoint="tcp://engine-host:5558"))
    assert answers.streams == {0: Stream("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558")}
    lost = answers_of("http://10.0.0.5:8000", r0=config(replay_endpoint="tcp://127.0.0.1:5558")).streams
    assert lost is not None and lost[0].replay is None and "cannot be reached" in lost[0].note


def test_the_finding_of_an_engine_without_events_says_how_to_have_them() -> None:
    for answer in (
        answers_of(),
        answers_of(r0=config(enable_kv_cache_events=False)),
        answers_of(r0=config(publisher="null")),
    ):
        assert answer.streams == {} and "--kv-events-config" in answer.problem and not answer.silent


@pytest.mark.parametrize("raw", [b"", b"[]", b"<html>", b'{"x": {}}', b'{"0": 5}', b"[" * 100_000])
def test_an_unreadable_answer_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        streams_in(raw, "http://h:1")


def test_an_engine_names_its_base_model() -> None:
    models = [{"id": "adapter", "parent": "base"}, {"id": "base", "parent": None, "object": "model"}]
    assert model_in(json.dumps({"data": models}).encode()) == "base"
    for raw, words in ((b'{"data": []}', "names no model"), (b"<html>", "no list of models")):
        with pytest.raises(ValueError, match=words):
            model_in(raw)


def spec(text: str) -> Candidate:
    return candidate_of(listed_worker(text), STATIC)


RANKS = answers_of(
    r0=config(replay_endpoint="tcp://*:6000"), r1=config(endpoint="tcp://*:5558", replay_endpoint="tcp://*:6001")
)


def test_an_address_alone_stands_for_all_ranks_of_its_engine() -> None:
    registrations = completed(spec("w0=http://10.0.0.5:8000"), msgspec.structs.replace(RANKS, model="m"), [])
    assert [
        (registration.worker, registration.events, registration.replay, registration.source)
        for registration in registrations
    ] == [
        (WorkerKey("m", "w0", 0), "tcp://10.0.0.5:5557", "tcp://10.0.0.5:6000", STATIC),
        (WorkerKey("m", "w0", 1), "tcp://10.0.0.5:5558", "tcp://10.0.0.5:6001", STATIC),
    ]


def test_a_rank_that_is_named_is_that_rank() -> None:
    (registration,) = completed(spec("w0=http://10.0.0.5:8000,model=m,dp_rank=1"), RANKS, [])
    assert (registration.worker, registration.events) == (WorkerKey("m", "w0", 1), "tcp://10.0.0.5:5558")
    (unknown,) = completed(spec("w0=http://10.0.0.5:8000,model=m,dp_rank=7"), RANKS, [])
    assert unknown.events is None and "no rank 7: there are 0, 1" in unknown.note


def test_the_only_core_behind_an_address_needs_no_rank() -> None:
    (registration,) = completed(
        spec("w3=http://10.0.0.5:8000,model=m"), answers_of(r3=config(endpoint="tcp://*:5560")), []
    )
    assert (registration.worker, registration.events) == (WorkerKey("m", "w3", 0), "tcp://10.0.0.5:5560")


def registered(url: str) -> Registration:
    return registration_of(RegisterBody(worker_id="w0", url=url, model="m"))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h/v1/", "http://h"),
        ("https://h/team/a/v1//", "https://h/team/a"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000/"),
        ("http://v1", "http://v1"),
        ("http://h/v10", "http://h/v10"),
        ("http://h/xv1", "http://h/xv1"),
        ("http://h/v1/x", "http://h/v1/x"),
    ],
)
def test_the_v1_of_a_base_url_is_taken_off_at_every_door(given: str, url: str) -> None:
    as_dynamo = msgspec.convert({"worker_id": 7, "endpoint": given, "model_name": "m"}, RegisterBody)
    stored = msgspec.json.encode(registered("http://h")).replace(b'"http://h"', msgspec.json.encode(given))
    worker = registered(given).worker
    for registration in (
        spec(f"w0={given}").registration,
        *(
            candidate.registration
            for candidate in parse_workers(f"- {{worker_id: w0, url: '{given}'}}", "w.yaml", STATIC)
        ),
        *(candidate.registration for candidate in parse_workers(f"- w0={given}", "w.yaml", STATIC)),
        registered(given),
        *(registration_of(body) for body in registrations_in(as_dynamo)),
        patched(registered("http://other"), WorkerPatch(url=given)),
        # A router of a version before this rule stored the address in this form.
        decode(worker, stored),
    ):
        assert registration.url == url


def test_stated_fields_are_not_taken_from_the_engine() -> None:
    written = spec("w0=http://h:1,model=m,events=tcp://h:2")
    assert not written.asks_model and not written.asks_events
    assert completed(written, EngineAnswers(), []) == [written.registration]
    assert not spec("w0=http://h:1,model=m,patch=tcp://h:2").asks_events
    assert spec("w0=http://h:1,model=m,patch=off").asks_events


def test_known_answers_are_kept_while_an_engine_is_away() -> None:
    away = EngineAnswers(problem="it is not known (refused)")
    assert completed(spec("w0=http://h:1"), away, []) == []
    registrations = completed(spec("w0=http://h:1"), msgspec.structs.replace(RANKS, model="m"), [])
    assert completed(spec("w0=http://h:1"), away, registrations) == registrations
    assert completed(spec("w0=http://h:2"), away, registrations) == [], "at another address it is another engine"
    (bare,) = completed(spec("w0=http://h:1,model=m"), away, [])
    assert (bare.events, bare.note) == (None, away.problem)


def test_the_usual_ports_are_tried_only_where_they_cannot_be_anothers() -> None:
    silent = EngineAnswers(model="m", streams={}, silent=True, problem="no such path")
    plain = spec("w0=http://h:1")
    assert completed(plain, silent, [])[0].events is None
    pod = msgspec.structs.replace(plain, fallback=Stream("tcp://h:5557", "tcp://h:5558"))
    assert completed(pod, silent, [])[0].events == "tcp://h:5557"
    without = EngineAnswers(model="m", streams={}, problem="it publishes none")
    assert completed(pod, without, [])[0].events is None


def test_ranks_count_the_ports_up_as_vllm_does() -> None:
    template = Candidate(
        Registration(WorkerKey("m", "w0"), events="tcp://h:5557", replay="tcp://[fd00::1]:6000"), any_rank=True
    )
    registrations = [candidate.registration for candidate in ranked(template, 3)]
    assert [(r.worker.dp_rank, r.events, r.replay) for r in registrations] == [
        (0, "tcp://h:5557", "tcp://[fd00::1]:6000"),
        (1, "tcp://h:5558", "tcp://[fd00::1]:6001"),
        (2, "tcp://h:5559", "tcp://[fd00::1]:6002"),
    ]
