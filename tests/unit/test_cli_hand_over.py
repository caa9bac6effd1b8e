# SPDX-License-Identifier: Apache-2.0
"""`kvrouter drain --hand-over` and `kvrouter warm`: their requests, their sentences, their end and their exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.router.app.cli import hand_over
from kvrouter.router.app.cli.commands import run
from kvrouter.router.app.cli.hand_over import shown_bytes, size_bytes
from kvrouter.router.base.common.errors import SettingError
from tests.support.stub_router import LOAD, WORKER, StubRouter, loads, unset_client_variables

PART: dict[str, Any] = {
    "worker_id": "w1",
    "dp_rank": 0,
    "model": "m",
    "end": "",
    "problem": "",
    "offered": 0,
    "fetched": 0,
    "fetched_bytes": 0,
    "present": 0,
    "missed": 0,
    "evicted": 0,
}
LIVE = WORKER | {"dp_rank": 0, "state": "live", "reason": ""}
TAKEN = {"offered": 1_300, "fetched": 1_200, "fetched_bytes": 3 << 29, "present": 98, "missed": 2, "evicted": 7}
HAND_OVER, PROGRESS = "/workers/w0/hand_over", "/hand_overs/42"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_client_variables(monkeypatch)
    monkeypatch.setattr(hand_over, "POLL_S", 0.001)


@pytest.fixture
def draining(stub: StubRouter) -> StubRouter:
    stub.answer("/workers/w0", {"workers": [LIVE]})
    stub.answer("/loads", loads(LOAD | {"dp_rank": 0}))
    stub.answer(HAND_OVER, {"number": 42, "parts": [PART]})
    return stub


def test_drain_hands_over_and_says_what_each_worker_took(
    draining: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    draining.answer(PROGRESS, {"number": 42, "parts": [PART | TAKEN | {"end": "complete"}]})
    arguments = ["--hand-over", "--to", "w1", "--max-bytes", "2GiB", "--within", "30"]
    assert run(["drain", "w0", "--url", draining.url, *arguments]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "w0 (model m) drains: it gets no new requests; 3 are in flight there",
        "w1 (model m) took over 1,200 of 1,300 chunks (1.5 GiB, 98 were there, 7 made room, 2 did not come): all of its share",
        "1,200 chunks (1.5 GiB) handed over to 1 worker",
    ]
    (begun,) = [request for request in draining.received if request[1] == HAND_OVER]
    assert json.loads(begun[2]) == {"to": ["w1"], "max_bytes": 2 << 30, "within_s": 30.0}
    # The worker gets no new requests when the copy begins.
    kinds = [request[0] for request in draining.received]
    assert kinds.index("PATCH") < kinds.index("POST")


def test_the_result_as_json_is_one_object(draining: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    draining.answer(PROGRESS, {"number": 42, "parts": [PART | TAKEN | {"end": "room"}]})
    assert run(["drain", "w0", "--url", draining.url, "--hand-over", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["workers"][0]["draining"] is True
    assert answer["hand_over"] == {"number": 42, "parts": [PART | TAKEN | {"end": "room"}]}


def test_an_engine_that_no_longer_answers_is_not_waited_for(
    draining: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    draining.answer(PROGRESS, {"error": {"message": "unknown", "type": "t", "code": "unknown_hand_over"}}, 404)
    assert run(["drain", "w0", "--url", draining.url, "--hand-over"]) == 1
    assert "w1 (model m) takes nothing over: it no longer answers" in capsys.readouterr().out


def test_ctrl_c_ends_the_hand_over_and_not_the_drain(
    draining: StubRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draining.answer(PROGRESS, {"number": 42, "parts": [PART | TAKEN]})

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvrouter.router.app.cli.hand_over.time.sleep", interrupt)
    assert run(["drain", "w0", "--url", draining.url, "--hand-over"]) != 0
    assert [request[:2] for request in draining.received[-1:]] == [("DELETE", PROGRESS)]
    assert "stopped: 1,200 chunks" in capsys.readouterr().err


def test_a_hand_over_that_cannot_begin_is_the_error_line_after_the_drain(
    draining: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {
        "error": {"message": "no worker can take over the cache of w0: w1 drains", "type": "t", "code": "conflict"}
    }
    draining.answer(HAND_OVER, error, 409)
    assert run(["drain", "w0", "--url", draining.url, "--hand-over"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("w0 (model m) drains") and err == "kvrouter: " + error["error"]["message"] + "\n"


@pytest.mark.parametrize("flag", [["--to", "w1"], ["--max-bytes", "1G"], ["--within", "3"]])
def test_bounds_without_a_hand_over_are_refused(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    assert run(["drain", "w0", "--url", stub.url, *flag]) != 0
    assert "--hand-over" in capsys.readouterr().err and not stub.received


def test_warm_takes_the_fullest_live_worker_of_the_model(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    new = LIVE | {"worker_id": "w9", "residency": {}}
    rows = [
        new,
        LIVE | {"worker_id": "w1", "residency": {"g0:CPU": 5, "g0:GPU": 90}},
        LIVE | {"worker_id": "w0", "residency": {"g0:CPU": 4, "g1:CPU": 4}},
        LIVE | {"worker_id": "w2", "residency": {"g0:CPU": 70}, "state": "down"},
        LIVE | {"worker_id": "w3", "residency": {"g0:CPU": 70}, "model": "other"},
    ]
    stub.answer("/workers/w9", {"workers": [new]})
    stub.answer("/workers", {"workers": rows})
    stub.answer(HAND_OVER, {"number": 42, "parts": [PART | TAKEN | {"worker_id": "w9", "end": "complete"}]})
    assert run(["warm", "w9", "--url", stub.url]) == 0
    assert json.loads(stub.received[-1][2]) == {"to": ["w9"]}
    assert capsys.readouterr().out.startswith("w9 (model m) took over 1,200")


def test_warm_reads_named_sources_in_turn_and_divides_the_bounds(stub: StubRouter) -> None:
    stub.answer("/workers/w9", {"workers": [LIVE | {"worker_id": "w9"}]})
    for name in ("w0", "w1"):
        reply = {"number": 42, "parts": [PART | TAKEN | {"worker_id": "w9", "end": "complete"}]}
        stub.answer(f"/workers/{name}/hand_over", reply)
    arguments = ["--from", "w0", "--from", "w1", "--max-bytes", "100", "--within", "10", "--json"]
    assert run(["warm", "w9", "--url", stub.url, *arguments]) == 0
    begun = [(path, json.loads(body)) for method, path, body, _ in stub.received if method == "POST"]
    wanted = {"to": ["w9"], "max_bytes": 50, "within_s": 5.0}
    assert begun == [("/workers/w0/hand_over", wanted), ("/workers/w1/hand_over", wanted)]


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("500M", 500 << 20), ("20G", 20 << 30), ("20GiB", 20 << 30), ("1KB", 1024)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "1.5G", "1P", "G", "1 G", "\u0661"])
def test_a_wrong_size_says_what_to_write(text: str) -> None:
    with pytest.raises(SettingError, match="20GiB"):
        size_bytes(text)


def test_sizes_are_shown_with_a_unit() -> None:
    assert [shown_bytes(size) for size in (0, 1023, 1536, 3 << 29)] == ["0 B", "1023 B", "1.5 KiB", "1.5 GiB"]
