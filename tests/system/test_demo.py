# SPDX-License-Identifier: Apache-2.0
"""The demo against a router that knows nothing, and against the real one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvrouter.router.app.cli.demo import prompts_of
from kvrouter.simulator.demo.demo import WARMUP_SHARE, DemoOptions, run_demo
from kvrouter.simulator.demo.router import DemoFailed, RouterProcess, call
from kvrouter.simulator.demo.trace import SCENES
from tests.support.fleet import until

# A router that answers like ours, predicts nothing, and sends everything to the first worker.
IGNORANT = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
workers = {}
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def say(self, reply):
        body = json.dumps(reply).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.say({"workers": [{"worker_id": w, "state": "live", "seq": 10**9} for w in workers]})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/register":
            workers[body["worker_id"]] = body["url"]
            self.say({})
        elif self.path == "/query":
            self.say({"instances": {w: {"gpu": 0, "limited_by": None} for w in workers}})
        else:
            self.say({"worker_id": "w0", "endpoint": workers["w0"], "overlap": {"gpu": 0}, "reason": "none"})
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def ignorant(port: int, data_dir: Path) -> list[str]:
    return [sys.executable, "-c", IGNORANT, str(port)]


def test_a_router_that_ends_at_once_is_shown_with_its_log(tmp_path: Path) -> None:
    router = RouterProcess(
        tmp_path, command=lambda port, data: [sys.executable, "-c", "raise SystemExit('no database')"]
    )
    with pytest.raises(DemoFailed, match="no database"):
        router.start()
    router.stop()


def test_the_users_settings_do_not_reach_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_API_KEY", "secret")
    code = "import os; raise SystemExit(str([n for n in os.environ if n.startswith('KVROUTER_')]))"
    router = RouterProcess(tmp_path, command=lambda port, data: [sys.executable, "-c", code])
    with pytest.raises(DemoFailed, match=r"\[\]"):
        router.start()


def test_a_worker_that_never_shows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.simulator.demo.router.VISIBLE_S", 0.0)
    router = RouterProcess(tmp_path, command=ignorant)
    router.start()
    try:
        router.call("/register", {"worker_id": "w0", "url": "http://127.0.0.1:1"})
        router.wait_until_shown(["w0"], [0])
        with pytest.raises(DemoFailed, match="w9 is unknown"):
            router.wait_until_shown(["w0", "w9"], [0, 0])
    finally:
        router.stop()
        router.stop()


def test_wrong_predictions_end_with_1_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run_demo(DemoOptions(replicas=2, requests=12, json_output=True, command=ignorant)) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["prompts"] == 12
    assert 0 < report["summary"]["exact_prompts"] < 12
    assert len(report["rows"]) == 12
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = tmp_path / "demo.py"
    script.write_text(
        "import sys\nfrom kvrouter.simulator.demo.demo import DemoOptions, run_demo\n"
        f"IGNORANT = {IGNORANT!r}\n"
        "command = lambda port, data: [sys.executable, '-c', IGNORANT, str(port)]\n"
        "sys.exit(run_demo(DemoOptions(requests=2_000, command=command)))\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Sending the prompts" in line:
                break
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == code
    assert list(scratch.iterdir()) == []


def test_a_ctrl_c_that_python_drops_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __del__(self) -> None:
            # Python prints and drops what is raised here.
            signal.raise_signal(signal.SIGINT)

    pauses = 0

    def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        assert pauses < 3, "the demo goes on"
        Dying()

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert run_demo(DemoOptions(replicas=2, requests=12, stays=True, sleep=sleep)) == 0


@pytest.mark.parametrize("shape", SCENES)
def test_the_real_router_predicts_every_prompt_exactly(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(DemoOptions(shape=shape, replicas=3, requests=24, json_output=True)) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["exact_prompts"] == summary["prompts"] == 24
    assert summary["exact_checked"] == summary["checked"] == 72
    assert summary["nonzero_checked"] > 0


def test_a_trace_is_predicted_exactly_under_another_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n, "input_length": 1_300, "output_length": 900, "hash_ids": [n % 3, 10 + n % 6, 20 + n]}
        for n in range(12)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = prompts_of(trace, 100)
    assert [len(prompt.tokens) for prompt in prompts] == [1_300] * 12
    assert prompts[0].tokens[:512] == prompts[3].tokens[:512] and prompts[0].tokens[512:] != prompts[3].tokens[512:]
    assert prompts[0].tokens[:1_024] == prompts[6].tokens[:1_024]
    options = DemoOptions(replicas=2, prompts=prompts, policy="round_robin", json_output=True)
    assert run_demo(options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["checked"] == report["summary"]["exact_checked"] == 24
    chosen = [row["chosen"] for row in report["rows"]][len(prompts) // WARMUP_SHARE :]
    assert all(worker != next_worker for worker, next_worker in itertools.pairwise(chosen))


def test_the_demo_stays_until_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "kvrouter.router.cli", "demo", "--stay", "--requests", "8", "--replicas", "2"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("The fleet in a browser: "))
        url = line.split()[-1].rstrip("/")
        until(lambda: len(call(f"{url}/decisions")["decisions"]) > 20, "traffic goes on")
        outcomes = [decision["outcome"] for decision in call(f"{url}/decisions?limit=10")["decisions"]]
        assert any(
            outcome and outcome["outcome"] == "ok" and None not in (outcome["delivered_tokens"], outcome["ttft_s"])
            for outcome in outcomes
        ), "the traffic is streamed, so that the page has times of first tokens"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "Stopped after" in out and not err
    assert list(scratch.iterdir()) == []
    with pytest.raises(DemoFailed):
        call(f"{url}/health")
