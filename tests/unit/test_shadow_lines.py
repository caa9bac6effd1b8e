# SPDX-License-Identifier: Apache-2.0
"""Lines of another router's log, its names of workers, requests joined with their lines, and --listen's address."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.router.app.cli.shadow import read_address
from kvrouter.router.base.common.errors import SettingError
from kvrouter.shadow.awaited import Awaited, Pair
from kvrouter.shadow.log_line import LogReading, read_outcome, read_request
from kvrouter.shadow.observation import Observation, Outcome, Skip, Unjudged
from kvrouter.shadow.verdict import Snapshot
from kvrouter.shadow.worker_names import fleet_names

NOW_S, WALL_S = 100.0, 1_795_493_999.0
BODY = {"model": "m", "prompt": [1, 2, 3]}
GROWS = LogReading(grows=True, only_model="m")
FLEET = fleet_names(
    [
        {"worker_id": "w0", "dp_rank": 0, "model": "m", "url": "http://10.0.0.1:8000/"},
        {"worker_id": "w1", "dp_rank": 0, "model": "m", "url": "https://engine"},
        {"worker_id": "w1", "dp_rank": 1, "model": "m", "url": "https://engine"},
        {"worker_id": "w2", "dp_rank": 0, "model": "n", "url": None},
    ]
)


def read(line: Any, reading: LogReading = GROWS) -> Observation:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return read_request(raw, reading, now_s=NOW_S, wall_s=WALL_S)


@pytest.mark.parametrize(
    "line",
    [BODY, {"body": BODY}, {"request_body": json.dumps(BODY)}, {"request": BODY, "worker": "-"}],
    ids=["itself", "an object", "a text", "without a worker"],
)
def test_a_body_is_found_wherever_it_stands(line: dict[str, Any]) -> None:
    line_read = read(line)
    question = json.loads(line_read.question)
    assert question == {"model": "m", "token_ids": [1, 2, 3], "explain": True, "dry_run": True}
    assert line_read.outcome == Outcome(None, None, None) and line_read.seen_s == NOW_S


@pytest.mark.parametrize(
    "body", [{"token_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "sampling_params": {}}, {"input_ids": [[1, 2, 3]]}]
)
def test_bodies_with_token_ids_are_judged(body: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2}
    for line in (body, {"body": body}):
        line_read = read({**line, "response": {"text": "x", "meta_info": usage}})
        question = json.loads(line_read.question)
        assert (question["token_ids"], question["model"]) == ([1, 2, 3], "m") and "input_ids" not in question
        assert line_read.outcome == Outcome(None, 2, 3)


def test_a_text_is_a_prompt_in_a_body_alone() -> None:
    question = json.loads(read({"text": "of the log", "body": {"text": "hello"}}).question)
    assert question["prompt"] == "hello" and "text" not in question
    with pytest.raises(Unjudged):
        read({"text": "of the log"})
    with pytest.raises(Unjudged):
        read({"body": {"input": "hi", "text": {"format": {"type": "json_object"}}}})


@pytest.mark.parametrize(
    "body", [{"input_ids": [1], "lora_path": "a"}, {"text": "a", "image_data": "b"}, {"token_ids": [1], "features": {}}]
)
def test_prompts_with_other_blocks_than_those_of_their_tokens_are_not_judged(body: dict[str, Any]) -> None:
    with pytest.raises(Unjudged) as unjudged:
        read({"body": body})
    assert unjudged.value.reason is Skip.TOKENS_UNKNOWN


def test_worker_usage_id_and_age_are_read() -> None:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    line_read = read(
        {"body": BODY, "upstream_addr": "10.0.0.1:8000", "time": WALL_S - 1.5, "usage": usage, "request_id": 7}
    )
    assert line_read.outcome == Outcome("10.0.0.1:8000", 2, 3)
    assert (line_read.request_id, line_read.seen_s, line_read.is_served) == ("7", NOW_S - 1.5, True)
    assert read_outcome(json.dumps({"x_request_id": "a", "worker": "w0", "response": {"usage": usage}}).encode()) == (
        "a",
        Outcome("w0", 2, 3),
    )


def test_fields_that_steer_a_choice_are_left_out() -> None:
    line_read = read({"messages": [], "workers": ["w0"], "pinned_worker": {"worker_id": "w0"}, "tools": [1]})
    assert json.loads(line_read.question) == {
        "model": "m",
        "messages": [],
        "tools": [1],
        "explain": True,
        "dry_run": True,
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"no JSON", Skip.BROKEN),
        (b"[1]", Skip.BROKEN),
        (b"[" * 100_000, Skip.BROKEN),
        ({"body": {"input": "x"}}, Skip.NO_PROMPT),
        ({"body": {"prompt": None}}, Skip.NO_PROMPT),
        ({"prompt": ["a", "b"]}, Skip.SEVERAL_PROMPTS),
        ({**BODY, "time": "yesterday"}, Skip.BROKEN),
        ({**BODY, "cached_tokens": -1}, Skip.BROKEN),
        ({**BODY, "cached_tokens": True}, Skip.BROKEN),
    ],
)
def test_a_line_that_cannot_be_judged_has_its_reason(line: Any, reason: Skip) -> None:
    with pytest.raises(Unjudged) as problem:
        read(line)
    assert problem.value.reason is reason


def test_a_file_that_does_not_grow_needs_times() -> None:
    with pytest.raises(Unjudged) as problem:
        read(BODY, LogReading(grows=False))
    assert problem.value.reason is Skip.NO_TIME


def test_workers_are_found_by_all_their_names() -> None:
    for name in ("w0", "w0@0", "10.0.0.1:8000", "http://10.0.0.1:8000/v1", "10.0.0.9:1, 10.0.0.1:8000"):
        assert FLEET.ranks(name) == {"w0"}
    assert FLEET.ranks("engine:443") == FLEET.ranks("https://engine") == {"w1", "w1@1"}
    assert FLEET.ranks("w1@1") == {"w1@1"}
    for name in ("", "w9", "10.0.0.1", "http://[", "10.0.0.1:999999"):
        assert not FLEET.ranks(name)
    assert FLEET.only_model is None


def pair(name: str) -> Pair:
    return Pair(Snapshot(10, 16, {name: 1}, name, is_before=True), Outcome("header"))


def test_requests_and_lines_are_joined_whichever_comes_first_and_the_oldest_goes() -> None:
    awaited = Awaited(wait_s=5.0, max_waiting=2)
    assert awaited.add_snapshot("a", pair("a"), 0.0) == []
    (joined,) = awaited.add_outcome("a", Outcome("w0", 4, 10), 1.0)
    assert joined.outcome == Outcome("w0", 4, 10) and joined.snapshot.ours == "a"
    assert awaited.add_outcome("b", Outcome(None, 4, 10), 1.0) == []
    (joined,) = awaited.add_snapshot("b", pair("b"), 2.0)
    assert joined.outcome == Outcome("header", 4, 10)
    for number in range(3):
        dropped = awaited.add_snapshot(f"c{number}", pair(f"c{number}"), 3.0)
    assert [pair_left.snapshot.ours for pair_left in dropped] == ["c0"] and awaited.waiting == 2
    for number in range(3):
        awaited.add_outcome(f"d{number}", Outcome(), 3.0)
    assert awaited.unmatched == 1
    assert [pair_left.snapshot.ours for pair_left in awaited.expired(9.0)] == ["c1", "c2"]
    assert awaited.unmatched == 3 and list(awaited.rest()) == []


def test_snapshots_of_large_fleets_are_bounded_too() -> None:
    awaited = Awaited(wait_s=5.0, max_held=3)
    large = Pair(Snapshot(10, 16, {"a": 1, "b": 2}, "a", is_before=True), Outcome())
    assert awaited.add_snapshot("1", large, 0.0) == []
    assert awaited.add_snapshot("2", large, 0.0) == [large]


def test_the_address_to_listen_at_is_read() -> None:
    assert read_address("8089") == ("127.0.0.1", 8089)
    assert read_address("0.0.0.0:0") == ("0.0.0.0", 0)
    assert read_address("[::1]:80") == ("::1", 80)
    for wrong in ("", "x", "host:", "1:65536", "-1"):
        with pytest.raises(SettingError, match="--listen"):
            read_address(wrong)
