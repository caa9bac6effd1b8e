# SPDX-License-Identifier: Apache-2.0
"""One entry in the table of tiers adds a tier to hits, costs, answers, tables, metrics and the replay.

The judge itself gives no credit to a tier for which it has no rule, so `tests/support/four_tiers.py` enters the hits of
the fourth tier at the judge's border.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.app.cli.commands import run
from tests.support.four_tiers import BOOT
from tests.support.replay_traces import conversation_rows, write_rows


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("tiers") / "trace.jsonl", conversation_rows(20))


@pytest.fixture(scope="module")
def seen(trace: Path) -> dict[str, Any]:
    """Run a router with the fourth tier, and return what its parts say."""
    child = subprocess.run([sys.executable, "-c", BOOT, str(trace)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer


def test_a_hit_has_the_tier(seen: dict[str, Any]) -> None:
    assert seen["by_tier"] == [64, 64, 64, 80]


def test_query_has_its_field_behind_those_before_it(seen: dict[str, Any]) -> None:
    row = '{"longest_matched":80,"gpu":64,"cpu":64,"disk":64,"remote":80,"dp":{"0":80},"state":"live"}'
    assert (
        seen["template"]
        == seen["encoded"]
        == f'{{"instances":{{"w0":{row}}},"scores":{{"w0":{{"0":80}}}},"frequencies":[]}}'
    )


def test_select_explains_it(seen: dict[str, Any]) -> None:
    overlap = {"longest_matched": 80, "gpu": 64, "cpu": 64, "disk": 64, "remote": 80, "dp": {"0": 80}}
    select = seen["select"]
    assert select["overlap"] == select["candidates"][0]["overlap"] == overlap
    assert select["reason"] == "reuses 80 of 200 tokens (64 on the GPU, 16 more from remote)"
    assert select["effective_prefill_tokens"] == 120


@pytest.mark.parametrize("name", ["InstanceReply", "Overlap"])
def test_the_document_describes_it(seen: dict[str, Any], name: str) -> None:
    field = seen["document"][name]["properties"]["remote"]
    assert field == {"type": "integer", "description": "tokens reused with the remote tier too"}


def test_tables_have_its_column(seen: dict[str, Any]) -> None:
    heads, row, *_ = (line.split() for line in seen["table"].splitlines())
    assert heads[:6] == ["WORKER", "GPU", "+CPU", "+DISK", "+REMOTE", "UNCACHED"]
    assert row[:7] == [">", "w0", "64", "64", "64", "80", "120"]


def test_its_load_has_a_price(seen: dict[str, Any]) -> None:
    # The price of the entry, and the higher one that was measured for the tier beside the GPU.
    assert seen["costs"] == pytest.approx([120 + 16 * 0.9, 120 + 16 * 0.95])


def test_a_metric_has_its_label(seen: dict[str, Any]) -> None:
    samples = [line for line in seen["metric"].splitlines() if not line.startswith("#")]
    assert samples == [
        'kvrouter_resident_blocks{model="m",worker="w0",group="0",medium="REMOTE"} 3.0',
        'kvrouter_resident_blocks{model="m",worker="w0",group="0",medium="other"} 5.0',
    ]


def test_a_replay_predicts_with_it(seen: dict[str, Any], trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--trace", str(trace), "--workers", "1", "--policy", "kv", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    blocks, rest = divmod(seen["replay"]["predicted_tokens"] - row["predicted_tokens"], 16)
    # A worker has no hit until its first events have come.
    assert rest == 0 and row["requests"] - 3 <= blocks < row["requests"] == seen["replay"]["requests"]
