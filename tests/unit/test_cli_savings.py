# SPDX-License-Identifier: Apache-2.0
"""`kvrouter savings`: its table, its sentence, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.router.app.cli.commands import EXIT_FAILED, EXIT_USAGE, run
from tests.support.stub_router import StubRouter, unset_client_variables

DAY = {
    "day": "2026-11-27",
    "model": "gemma",
    "requests": 40,
    "prompt_tokens": 20_000,
    "reused_tokens": 15_000,
    "round_robin_tokens": 5_000,
    "saved_s": 12.34,
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_client_variables(monkeypatch)


def shown(stub: StubRouter, capsys: pytest.CaptureFixture[str], *days: dict[str, Any], since: str = "7d") -> str:
    stub.answer(f"/savings?days={since.removesuffix('d')}", {"days": list(days)})
    assert run(["savings", "--url", stub.url, "--since", since]) == 0
    return capsys.readouterr().out


def test_a_row_for_each_day_and_model_their_totals_and_what_they_mean(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(stub, capsys, DAY, DAY | {"day": "2026-11-26", "model": "[red]"})
    heading, first, second, totals = [line.split() for line in out.splitlines()[:4]]
    assert heading[:3] == ["DAY", "MODEL", "REQUESTS"]
    assert first == ["2026-11-27", "gemma", "40", "20.0k", "15.0k", "75%", "5000", "25%", "12.3"]
    assert second[1] == "[red]"
    assert totals == ["total", "80", "40.0k", "30.0k", "75%", "10.0k", "25%", "24.7"]
    sentence = " ".join(out.splitlines()[4:])
    for part in ("In the last 7 days", "75%", "24.7 GPU seconds", "in turn", "25%"):
        assert part in sentence


def test_without_a_measured_speed_no_seconds_are_claimed(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(shown(stub, capsys, DAY | {"saved_s": 0.0}, since="1d").split())
    assert "25% - total" in out
    assert "Today" in out and "no worker's speed is measured yet" in out


def test_without_a_prompt_it_says_so(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(stub, capsys, since="30d") == "In the last 30 days, no prompt was answered.\n"


def test_the_model_is_part_of_the_question_and_json_is_the_answer(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answer("/savings?days=7&model=a%2Fb", {"days": [DAY]})
    assert run(["savings", "--url", stub.url, "--model", "a/b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"days": [DAY]}


@pytest.mark.parametrize("since", ["0d", "36d", "7h", "", "-1", "seven", "١d"])
def test_a_wrong_number_of_days_is_refused_with_the_fix(since: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["savings", f"--since={since}"]) == EXIT_USAGE
    assert "write a number of days, 1d to 35d" in capsys.readouterr().err


def test_another_program_is_no_router(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/savings?days=7", {"days": [{"day": 1}]})
    assert run(["savings", "--url", stub.url]) == EXIT_FAILED
    assert "does not come from a router" in capsys.readouterr().err
