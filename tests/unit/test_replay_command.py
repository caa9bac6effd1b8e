# SPDX-License-Identifier: Apache-2.0
"""`kvrouter replay` end to end: its table, files and sentence, its one-line errors, and Ctrl-C."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.replay.policies.names import COMPARED
from kvrouter.replay.report.comparison import FleetRow, compared, sentence
from kvrouter.replay.report.table import COLUMNS, text
from kvrouter.replay.runs.policy_run import Summary
from kvrouter.replay.runs.simulate import simulate
from kvrouter.router.app.cli.commands import run
from tests.support.replay_traces import conversation_rows, write_rows

ROW = Summary(
    "kv", 10, False, 0, 4_000_000, 2_000_000, 2_000_000, 0.5, 0.9, 1.0, 1.0, 2.0, 3.0, 200.0, 0.1, 1.5, 60, 1, 0.2, 9.0
)
EACH = (400_000,) * 8, (0,) * 8, (10_000.0,) * 8
FLEET = FleetRow("a.jsonl", "mooncake", 10, 4_000_000, 60.0, "gemma3", 512, 8, *EACH, (), 1.0, 1)


def row(policy: str, **changes: Any) -> Summary:
    return msgspec.structs.replace(ROW, policy=policy, **changes)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "trace.jsonl", conversation_rows(40))


def test_the_table_has_every_policy_and_fits_80_columns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--trace", str(trace), "--workers", "2"]) == 0
    output = capsys.readouterr()
    assert max(map(len, output.out.splitlines())) <= COLUMNS
    assert all(f"\n{policy}" in output.out for policy in COMPARED)
    last = output.out.split("\n\n")[-2].splitlines()[-1].split()
    assert last[:3] == ["one", "pooled", "cache"] and int(last[3].replace(",", "")) > 0 and last[5:] == ["-"] * 6
    assert "Against round_robin, kv would " in output.out
    assert output.err == ""


def test_json_csv_and_plots_say_the_same(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "out.csv", tmp_path / "new" / "plots"
    flags = ["--policy", "kv", "--policy", "lmetric", "--csv", str(files[0]), "--json", "--plot", str(files[1])]
    assert run(["replay", "--trace", str(trace), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    assert [row["policy"] for row in rows] == ["kv", "lmetric", "one pooled cache"]
    assert [row["policy"] for row in report["rows"]] == ["kv", "lmetric"]
    reused = [row["reused_tokens"] for row in (*report["rows"], report["pooled"])]
    assert [int(row["reused_tokens"]) for row in rows] == reused and min(reused) > 0
    assert rows[-1]["ttft_mean_s"] == "" and float(rows[-1]["reused_share"]) == report["pooled"]["reused_share"]
    assert len(report["in_flight"]["kv"][0][1]) == report["fleet"]["workers"] == 8
    assert all((files[1] / name).read_bytes().startswith(b"\x89PNG") for name in ("ttft.png", "hit_tokens.png"))
    assert (files[1] / "balance.png").stat().st_size > 1000


def test_replicas_that_differ_and_restarts_are_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "3", "--cache-tokens", "400000,400000,90000", "--cpu-tokens", "0,0,500000"]
    flags += ["--prefill-rate", "10000,5000,5000", "--restart", "5:w1", "--restart", "2.5:0", "--policy", "kv"]
    assert run(["replay", "--trace", str(trace), *flags]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "cache 2 x 400,000 + 1 x 90,000 tokens, CPU tier 2 x 0 + 1 x 500,000 tokens" in output
    assert "1 x 10,000 + 2 x 5,000 tokens/s each; restarts: w1 at 5 s, w0 at 2.5 s; seed 1" in output
    assert run(["replay", "--trace", str(trace), "--json", *flags]) == 0
    fleet = json.loads(capsys.readouterr().out)["fleet"]
    assert fleet["cache_tokens"] == [400_000, 400_000, 90_000]
    assert fleet["restarts"] == [{"time_s": 5.0, "worker": 1}, {"time_s": 2.5, "worker": 0}]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--shape", "cube"], "--shape cube is not known; take one of llama"),
        (["--format", "pcap"], "--format pcap is not known; take one of auto"),
        (["--policy", "best"], "--policy best is not known; take one of kv"),
        (["--workers", "0"], "--workers 0: from 1"),
        (["--cache-tokens", "0"], "--cache-tokens 0"),
        (["--cache-tokens", "1"], "a replica of this size cannot run"),
        (["--cache-tokens", "400000,x"], "--cache-tokens 400000,x: give one number, or one for each"),
        (["--cache-tokens", "400000,0", "--workers", "2"], "--cache-tokens 0"),
        (["--cpu-tokens", "1,2,3"], "--cpu-tokens has 3 values for 8 workers: give one, or one for each"),
        (["--prefill-rate", "1,2"], "--prefill-rate has 2 values for 8 workers"),
        (["--prefill-rate", "fast"], "--prefill-rate fast: give one number"),
        (["--restart", "60"], "--restart 60: give seconds and a replica's number"),
        (["--restart", "60:8"], "--restart: there is no worker 8 to restart"),
        (["--restart", "-1:0"], "--restart: a restart at -1 s"),
        (["--speedup", "0"], "--speedup 0"),
        (["--speedup", "nan"], "--speedup nan"),
        (["--block-tokens", "48"], "take a --block-tokens that does"),
        (["--prefill-rate", "0"], "--prefill-rate"),
        (["--step-ms", "nan"], "--prefill-rate, --step-ms"),
        (["--bytes-per-token", "-1"], "--bytes-per-token -1"),
        (["--piece-tokens", "100"], "hash_ids of 100 tokens"),
        (["--tokenizer", "/nowhere"], "/nowhere"),
        (["--csv", "/nowhere/a.csv", "--policy", "kv"], "cannot write --csv"),
        (["--trace", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_a_wrong_flag_prints_one_line(
    trace: Path, flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", "--trace", str(trace), *flags]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_without_matplotlib_the_error_says_what_to_install(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["replay", "--trace", str(trace), "--plot", str(tmp_path)]) == 2
    assert "pip install 'matplotlib<4,>=3.9'" in capsys.readouterr().err


def test_ctrl_c_shows_what_is_done_and_runs_no_further_policy(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(trace: Any, shape: Any, policy: str, *rest: Any, on_request: Any, **more: Any) -> Any:
        def count(done: int) -> None:
            on_request(done)
            if policy == "least_load" and done == 25:
                raise KeyboardInterrupt

        return simulate(trace, shape, policy, *rest, on_request=count, **more)

    monkeypatch.setattr("kvrouter.replay.command.simulate", interrupted)
    assert run(["replay", "--trace", str(trace)]) == 130
    out = capsys.readouterr().out
    assert "round_robin" in out and "least_load (partial)" in out and "lmetric" not in out
    assert "least_load was ended after" in out and "pooled" not in out


def test_ctrl_c_in_the_bound_shows_the_policies(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(trace: Any, shape: Any, **more: Any) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvrouter.replay.command.pooled_reuse", interrupted)
    assert run(["replay", "--trace", str(trace), "--policy", "kv"]) == 130
    out = capsys.readouterr().out
    assert "kv*" in out and "partial" not in out and "pooled" not in out


def test_on_a_terminal_there_is_a_bar_on_stderr_alone(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert run(["replay", "--trace", str(trace), "--policy", "kv", "--json"]) == 0
    output = capsys.readouterr()
    json.loads(output.out)
    assert "kv" in output.err


def test_the_sentence_says_what_is_saved_and_who_is_better() -> None:
    worse = row("round_robin", reused_tokens=1_000_000, computed_gpu_s=300.0, ttft_mean_s=2.0, ttft_p95_s=5.0)
    saving = sentence([worse, row("kv")])
    assert saving == (
        "Against round_robin, kv would save this fleet 1.00 M of 3.00 M computed prompt tokens (33.3%, 100 GPU-seconds), "
        "and first tokens would come 1.00 s sooner on average (1.00 s, not 2.00 s; p95 2.00 s, not 5.00 s)."
    )
    better = row("lmetric", reused_tokens=2_100_000, ttft_mean_s=0.9)
    assert sentence([worse, better, row("kv")]).endswith(
        "; lmetric reuses more (2.10 M) and lmetric has sooner first tokens (900 ms)."
    )
    # Within a hundredth, no policy is better.
    equal = row("lmetric", reused_tokens=2_010_000, ttft_mean_s=0.995)
    assert sentence([worse, equal, row("kv")]) == saving
    assert "kv would cost this fleet 1.00 M" in sentence([row("round_robin"), row("kv", reused_tokens=1_000_000)])
    assert sentence([row("kv")]).startswith("Under kv this fleet would not compute 2.00 M of 4.00 M")
    assert "kv was not among the policies" in sentence([row("dynamo")])
    assert sentence([row("kv", partial=True)]).startswith("No policy saw the whole trace")


def test_small_numbers_have_small_units() -> None:
    fast = {"ttft_mean_s": 0.034, "ttft_p95_s": 0.05, "reused_tokens": 7_680, "prompt_tokens": 15_600}
    rows = [row("round_robin", **fast | {"ttft_mean_s": 0.03, "achieved_share": 6_144.0}), row("kv", **fast)]
    table = text(compared(FLEET, rows, None, []))
    cells = next(line for line in table.splitlines() if line.startswith("round_robin")).split()
    assert (cells[1], cells[3]) == ("7,680", "-"), "there was nothing to reuse at any choice"
    assert "come 4 ms later on average (34 ms, not 30 ms; p95 50 ms, not 50 ms)" in " ".join(table.split())


def test_large_numbers_keep_their_columns() -> None:
    slow = row("full_attention_only", ttft_mean_s=12_345.6, ttft_p50_s=99_999.0, ttft_p95_s=9e4, ttft_p99_s=99_999.9)
    table = text(compared(FLEET, [slow, row("kv", partial=True)], None, ["a note " * 30]))
    assert max(map(len, table.splitlines())) <= COLUMNS
    assert len(next(line for line in table.splitlines() if line.startswith("full_attention_only")).split()) == 9
