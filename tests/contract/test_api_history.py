# SPDX-License-Identifier: Apache-2.0
"""`GET /history` and `GET /savings`: their parameters, and answers before any traffic."""

from __future__ import annotations

import pytest

from kvrouter.router.serve.api.http.http_api import HttpApi
from tests.contract.api_support import call


@pytest.mark.parametrize(
    ("query", "range_s", "step_s"),
    [("", 3_600, 5), ("range=15m", 900, 5), ("range=1h&model=m", 3_600, 5), ("range=24h", 86_400, 60)],
)
def test_a_range_has_its_steps(app: HttpApi, query: str, range_s: int, step_s: int) -> None:
    for version in ("", "/v1"):
        answer = call(app, "GET", f"{version}/history", query=query).json()
        assert (answer["range_s"], answer["step_s"], answer["models"]) == (range_s, step_s, [])
        assert {len(column) for column in (*answer["series"].values(), answer["time_s"])} == {range_s // step_s}
        assert set(answer["series"]) == set(answer["totals"])
        assert answer["totals"]["requests"] == 0 and answer["totals"]["ttft_p50_s"] is None


def test_no_savings_before_any_traffic(app: HttpApi) -> None:
    assert call(app, "GET", "/savings", query="days=35&model=m").json() == {"days": []}


@pytest.mark.parametrize(
    ("path", "query"),
    [("/history", "range=2h"), ("/history", "range="), ("/savings", "days=0"), ("/savings", "days=36")],
)
def test_a_wrong_parameter_is_refused(app: HttpApi, path: str, query: str) -> None:
    answer = call(app, "GET", path, query=query)
    assert answer.status == 400 and "parameter" in answer.json()["error"]["message"]
