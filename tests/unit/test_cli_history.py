# SPDX-License-Identifier: Apache-2.0
"""`kvrouter history`: its table, its sentence, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.contract.history import RANGES_S, Range
from kvrouter.router.app.cli.commands import EXIT_FAILED, EXIT_USAGE, run
from kvrouter.router.app.cli.history import RANGES, ROW_S, rows_of
from tests.support.stub_router import StubRouter, unset_client_variables

# A noon in UTC, in seconds since 1970.
BEGAN_S = 1_795_780_800
STEP: dict[str, Any] = {
    "requests": 40,
    "failed": 1,
    "prompt_tokens": 20_000,
    "delivered_tokens": 15_000,
    "predicted_tokens": 15_000,
    "possible_tokens": 16_000,
    "chosen_tokens": 15_000,
    "saved_s": 12.34,
    "ttft_p50_s": 0.1,
    "ttft_p95_s": 0.5,
}
SLOW = STEP | {"failed": 0, "ttft_p50_s": 0.2, "ttft_p95_s": 0.4}
IDLE = dict.fromkeys(STEP, 0) | {"ttft_p50_s": None, "ttft_p95_s": None}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_client_variables(monkeypatch)


def answer(*steps: dict[str, Any], step_s: int = 5, **totals: Any) -> dict[str, Any]:
    sums = {name: sum(step[name] or 0 for step in steps) for name in STEP} | {"ttft_p50_s": 0.15, "ttft_p95_s": 0.45}
    return {
        "range_s": 3_600,
        "step_s": step_s,
        "models": ["gemma", "other"],
        "time_s": [BEGAN_S + step_s * number for number in range(len(steps))],
        "series": {name: [step[name] for step in steps] for name in STEP},
        "totals": sums | totals,
        "last_minute": IDLE,
    }


def shown(stub: StubRouter, capsys: pytest.CaptureFixture[str], reply: dict[str, Any], wanted: str = "1h") -> str:
    stub.answer(f"/history?range={wanted}", reply)
    assert run(["history", "--url", stub.url, "--range", wanted]) == 0
    return capsys.readouterr().out


def test_a_row_for_every_five_minutes_the_sums_of_the_hour_and_what_they_mean(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(stub, capsys, answer(STEP, SLOW, *[IDLE] * 58, STEP))
    heading, first, second, totals = out.splitlines()[:4]
    assert heading.split()[:3] == ["BEGAN", "REQUESTS", "FAILED"]
    values = ["80", "1", "40.0k", "30.0k", "75%", "24.7", "0.200", "s", "0.500", "s"]
    assert first.split()[1:] == values and first.split()[0].endswith(":00")
    assert second.split()[1:3] == ["40", "1"] and second.split()[0].endswith(":05")
    assert totals.split()[:4] == ["all", "1h", "120", "2"] and totals.split()[-4:] == ["0.150", "s", "0.450", "s"]
    sentence = " ".join(out.splitlines()[4:])
    for part in ("In the last hour, 120 requests ended", "2 of them (2%) failed", "45.0k of 60.0k", "0.450 s"):
        assert part in " ".join(sentence.split())


@pytest.mark.parametrize("wanted", RANGES)
def test_every_range_has_about_a_dozen_rows_with_all_of_its_requests(wanted: str) -> None:
    step_s = 60 if wanted == "24h" else 5
    reply = answer(*[STEP] * (RANGES_S[Range(wanted)] // step_s), step_s=step_s)
    rows = rows_of(reply, ROW_S[Range(wanted)])
    assert 10 <= len(rows) <= 16
    assert sum(row["requests"] for row in rows) == reply["totals"]["requests"]


def test_a_row_without_streams_or_speeds_claims_neither(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    step = STEP | {"saved_s": 0.0, "ttft_p50_s": None, "ttft_p95_s": None}
    out = shown(stub, capsys, answer(step, ttft_p50_s=None, ttft_p95_s=None), "24h")
    assert out.splitlines()[1].split()[-3:] == ["-", "-", "-"]
    assert "no answer was streamed" in " ".join(out.split())


def test_without_a_request_the_sentence_says_so(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(stub, capsys, answer(IDLE), "15m")
    assert out == "In the last 15 minutes, no request ended.\n"


def test_the_model_is_part_of_the_question_and_json_is_the_answer(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = answer(STEP)
    stub.answer("/history?range=1h&model=a%2Fb", reply)
    assert run(["history", "--url", stub.url, "--model", "a/b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reply


def test_a_model_without_traffic_differs_from_a_quiet_one(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("gemma", "gema"):
        stub.answer(f"/history?range=1h&model={model}", answer(IDLE))
    assert run(["history", "--url", stub.url, "--model", "gemma"]) == 0
    assert "no request ended" in capsys.readouterr().out
    assert run(["history", "--url", stub.url, "--model", "gema"]) == EXIT_USAGE
    assert "models with traffic: gemma, other" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", ["2h", "", "1H", "900", "٢4h"])
def test_a_wrong_range_is_refused_with_the_fix(wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["history", f"--range={wanted}"]) == EXIT_USAGE
    assert "write one of 15m, 1h, 24h" in capsys.readouterr().err


@pytest.mark.parametrize("reply", [{}, {"totals": {}}, {"totals": {"requests": 1}}, []])
def test_another_program_is_no_router(reply: Any, stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/history?range=1h", reply)
    assert run(["history", "--url", stub.url]) == EXIT_FAILED
    assert "does not come from a router" in capsys.readouterr().err
