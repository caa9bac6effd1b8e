# SPDX-License-Identifier: Apache-2.0
"""Output of `kvrouter tail` and `kvrouter explain --request`."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from kvrouter.router.app.cli.commands import run
from tests.support.stub_router import SELECTED, StubRouter, unset_client_variables

BASE = {"time_s": 1_795_493_999.29, "model": "m", "worker_id": "w0", "dp_rank": 1}
EVENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "stored", "group_idx": 0, "medium": "GPU", "blocks": 24, "seq": 17}, "24 blocks, group 0 on GPU, seq 17"),
    (
        {"type": "removed", "group_idx": None, "medium": "STORAGE", "owner": "o", "blocks": 1},
        "1 block, group - on STORAGE o",
    ),
    ({"type": "epoch", "epoch": "e1", "reason": "restarted"}, "e1: restarted"),
    ({"type": "gap", "count": 2, "reason": "batches 1 to 2"}, "2 times: batches 1 to 2"),
    ({"type": "state", "state": "down", "credited": False, "reason": "gone\x1b[2J"}, "down, no credit: gone?[2J"),
    (
        {"type": "decision", "num_tokens": 9, "reason": "reuses 8", "skipped": 3},
        "9 tokens: reuses 8 (3 decisions before it are not shown)",
    ),
    (
        {
            "type": "outcome",
            "outcome": "ok",
            "status": 200,
            "predicted_tokens": 8,
            "delivered_tokens": 6,
            "failed": False,
        }
        | {"e2e_s": 0.25, "selection_id": "s1"},
        "ok, status 200, 8 tokens predicted, 6 delivered, after 0.250 s, selection s1",
    ),
    (
        {
            "type": "outcome",
            "outcome": "client_gone",
            "delivered_tokens": 6,
            "failed": False,
            "e2e_s": 2,
            "selection_id": "s",
        },
        "client gone, 6 tokens delivered, after 2.000 s, selection s",
    ),
    (
        {
            "type": "outcome",
            "outcome": "server_error\x1b",
            "status": 500,
            "failed": True,
            "e2e_s": 0.1,
            "selection_id": "s",
        },
        "failed: server error?, status 500, after 0.100 s, selection s",
    ),
)
DECISION = SELECTED | {
    "num_tokens": 3,
    "time_s": 1_795_493_999.0,
    "proof": "exact",
    "compared": 5,
    "outcome": {
        "outcome": "ok",
        "predicted_tokens": 2,
        "delivered_tokens": 1,
        "prompt_tokens": 3,
        "completion_tokens": None,
        "ttft_s": 0.25,
        "e2e_s": 0.5,
        "fetched_tokens": 1,
    },
    "earlier": ["s0"],
    "pull": {
        "worker_id": "w1",
        "dp_rank": 0,
        "tokens": 3,
        "fetched_tokens": 1,
        "timeout_s": 0.1,
    },
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_client_variables(monkeypatch)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    # The command sleeps while it waits for the router to come back.
    monkeypatch.setattr(time, "sleep", interrupted)


def stream(*events: dict[str, Any]) -> bytes:
    blocks = (f"id: life-{n}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n" for n, event in enumerate(events))
    return (": ping\n\n" + "".join(blocks)).encode()


def test_each_event_is_a_line_and_control_characters_are_not_printed(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers["/events?"] = (200, stream(*(BASE | event for event, _ in EVENTS)))
    assert run(["tail", "--url", stub.url]) == 130
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == len(EVENTS)
    for line, (event, text) in zip(lines, EVENTS, strict=True):
        assert re.match(rf"\d\d:\d\d:\d\d\.290 {event['type']} +w0@1 +{re.escape(text)}$", line), line
    assert "the router ended the stream; connecting again" in err


def test_an_event_that_is_no_event_of_a_router_is_refused(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answers["/events?"] = (200, stream(BASE | {"type": "outcome", "outcome": "ok"}))
    assert run(["tail", "--url", stub.url]) == 130
    assert "does not come from a router of this version" in capsys.readouterr().err


def test_filters_are_sent_to_the_router_and_json_is_passed_through(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/events?worker=w+0&model=m&type=stored%2Cgap&hashes=true"
    stub.answers[path] = (200, stream(BASE | EVENTS[0][0]))
    flags = ["--worker", "w 0", "--model", "m", "--type", "stored,gap", "--hashes", "--json", "--api-key", "k"]
    assert run(["tail", "--url", stub.url, *flags]) == 130
    assert json.loads(capsys.readouterr().out) == BASE | EVENTS[0][0]
    assert stub.received == [("GET", path, b"", "Bearer k")]


def test_a_refusal_ends_the_command(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"error": {"message": "parameter type: born is no event", "type": "invalid_request_error", "code": "x"}}
    stub.answers["/events?type=born"] = (400, json.dumps(body).encode())
    assert run(["tail", "--url", stub.url, "--type", "born"]) == 1
    assert "born is no event" in capsys.readouterr().err


def test_a_router_that_is_unreachable_at_first_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tail", "--url", "127.0.0.1:9"]) == 1
    assert "no router answers" in capsys.readouterr().err


def test_a_request_is_explained_by_its_id(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answers["/decisions/a%2Fb%20c"] = (200, json.dumps(DECISION).encode())
    assert run(["explain", "--url", stub.url, "--request", "a/b c"]) == 0
    out = capsys.readouterr().out
    assert "m, 3 tokens, proof: exact" in out and "... and 3 more workers" in out
    assert "w0 (http://e:8000): reuses 2 of 3 tokens" in out
    assert (
        "outcome: ok; predicted 2 tokens, reused 1 tokens, fetched 1 tokens, first token after 0.25 s, over after 0.5 s"
        in out
    )
    assert "attempts before it: s0" in out
    assert "fetches 1 tokens from w1, waits 0.1 s at most" in out
    assert run(["explain", "--url", stub.url, "--request", "a/b c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DECISION


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--request", "r", "--model", "m"], "names its prompt and model already"),
        (["--request", "r", "--prompt", "x"], "names its prompt and model already"),
        (["--prompt", "x"], "give --model NAME"),
        (["--model", "m"], "exactly one of"),
    ],
)
def test_wrong_options_say_what_to_write(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *arguments]) == 2
    assert problem in capsys.readouterr().err
