# SPDX-License-Identifier: Apache-2.0
"""The demo's parts, and the whole of it against a router that knows nothing and against the real one."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvrouter.simulator.demo.demo import run_demo
from kvrouter.simulator.demo.router import DemoFailed, Http, RouterProcess
from kvrouter.simulator.demo.summary import Row, Summary
from kvrouter.simulator.demo.trace import (
    SCENES,
    Rivals,
    full_attention_choice,
    full_attention_hit,
    make_prompts,
    working_set_blocks,
)
from kvrouter.simulator.demo.view import View

pytestmark = pytest.mark.slow

# Answers as the router does, predicts nothing, sends everything to the first worker.
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


ROW = Row(
    number=1,
    conversation=0,
    turn=1,
    prompt_tokens=500,
    predicted=[0, 320],
    real=[0, 320],
    limited_by=["g0 sliding_window", None],
    full_attention=[480, 320],
    chosen=1,
    by="kvrouter",
    reason="reuses 320",
    promised=320,
    reused=320,
    full_attention_choice=0,
)


@pytest.mark.parametrize("shape", SCENES)
def test_prompts_fit_fill_far_more_than_a_pool_and_repeat(shape: str) -> None:
    scene = SCENES[shape]
    prompts = make_prompts(random.Random(7), 48)
    assert prompts == make_prompts(random.Random(7), 48)
    assert prompts != make_prompts(random.Random(8), 48)
    assert working_set_blocks(scene, prompts) > 2 * scene.num_blocks
    sim = scene.replica()
    texts: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        before = texts.get(prompt.conversation, ())
        assert prompt.tokens[: len(before)] == before
        done = sim.run(prompt.tokens, max_tokens=prompt.max_tokens)
        texts[prompt.conversation] = prompt.tokens + done.output


@pytest.mark.parametrize("shape", SCENES)
def test_full_attention_alone_never_sees_less_than_the_hit(shape: str) -> None:
    sim = SCENES[shape].replica()
    more = 0
    for prompt in make_prompts(random.Random(1), 30):
        seen, real = full_attention_hit(sim, prompt.tokens), sim.find(prompt.tokens).tokens
        assert seen >= real
        more += seen > real
        sim.run(prompt.tokens, max_tokens=prompt.max_tokens)
    assert (more > 0) == (shape != "llama")


def test_among_equal_hits_the_least_used_replica_is_taken() -> None:
    assert full_attention_choice([5, 7, 7], [0, 3, 2]) == 2
    assert full_attention_choice([0, 0, 0], [1, 1, 1]) == 0


def test_rivals_start_alike() -> None:
    rivals = Rivals(SCENES["gemma3"], 3, warmup=100)
    for prompt in make_prompts(random.Random(3), 20):
        rivals.serve(prompt)
    assert rivals.round_robin_reused == rivals.full_attention_reused > 0


def test_a_row_is_exact_only_if_all_is() -> None:
    assert ROW.exact
    assert not replace(ROW, predicted=[16, 320]).exact
    assert not replace(ROW, reused=304).exact
    assert not replace(ROW, promised=304).exact


def test_a_row_knows_where_full_attention_errs() -> None:
    assert ROW.full_attention_wrong and ROW.full_attention_overpromised
    right = replace(ROW, full_attention_choice=1)
    assert not right.full_attention_wrong and not right.full_attention_overpromised
    same = replace(ROW, real=[320, 320])
    assert not same.full_attention_wrong and same.full_attention_overpromised


def test_the_summary_counts() -> None:
    summary = Summary()
    summary.add(ROW)
    summary.add(replace(ROW, number=2, predicted=[16, 320]))
    assert (summary.prompts, summary.exact_prompts, summary.wrong_numbers) == (2, 1, [2])
    assert (summary.checked, summary.exact_checked, summary.nonzero_checked) == (4, 3, 2)
    assert (summary.prompt_tokens, summary.reused_tokens) == (1000, 640)
    assert (summary.full_attention_overpromised, summary.full_attention_wrong) == (2, 2)


def test_the_view_is_plain_off_a_terminal() -> None:
    out = io.StringIO()
    view = View(2, quiet=False, console=Console(file=out, highlight=False, soft_wrap=True))
    view.opening("gemma3", SCENES["gemma3"], 2, 48, 12, 1200)
    view.header(1.0)
    view.row(ROW)
    view.row(replace(ROW, predicted=[16, 320]))
    summary = Summary()
    summary.add(ROW)
    view.closing("gemma3", [ROW], summary)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "w0 480, reuses 0: wrong replica, 320 elsewhere" in text
    assert text.count("✓") == text.count("✗") == 1
    assert "1 of 1 prompts predicted exactly" in text
    assert "it takes w0 for 480 tokens, which reuses 0, because of g0 sliding_window; w1 reuses 320" in text


def test_the_view_can_do_without_utf8() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    View(2, quiet=False, console=Console(file=out, highlight=False, soft_wrap=True)).row(ROW)
    out.flush()
    assert b" yes " in raw.getvalue()


def test_a_router_that_ends_at_once_is_shown_with_its_log(tmp_path: Path) -> None:
    router = RouterProcess(
        tmp_path, http=Http(), command=lambda port, data: [sys.executable, "-c", "raise SystemExit('no database')"]
    )
    with pytest.raises(DemoFailed, match="no database"):
        router.start()
    router.stop()


def test_the_users_settings_do_not_reach_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_API_KEY", "secret")
    code = "import os; raise SystemExit(str([n for n in os.environ if n.startswith('KVROUTER_')]))"
    router = RouterProcess(tmp_path, http=Http(), command=lambda port, data: [sys.executable, "-c", code])
    with pytest.raises(DemoFailed, match=r"\[\]"):
        router.start()


def test_a_worker_that_never_shows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.simulator.demo.router.VISIBLE_S", 0.0)
    router = RouterProcess(tmp_path, http=Http(), command=ignorant)
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
    assert run_demo(replicas=2, requests=12, json_output=True, command=ignorant) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["summary"]["prompts"] == 12
    assert 0 < said["summary"]["exact_prompts"] < 12
    assert len(said["rows"]) == 12
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = tmp_path / "demo.py"
    script.write_text(
        "import sys\nfrom kvrouter.simulator.demo.demo import run_demo\n"
        f"IGNORANT = {IGNORANT!r}\n"
        "sys.exit(run_demo(requests=200, command=lambda port, data: [sys.executable, '-c', IGNORANT, str(port)]))\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("  5 "):
                break
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == code
    assert list(scratch.iterdir()) == []


def test_senseless_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(shape="bert") == 2
    assert run_demo(replicas=0) == 2
    assert "gemma3" in capsys.readouterr().err


@pytest.mark.parametrize("shape", SCENES)
def test_the_real_router_predicts_every_prompt_exactly(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(shape=shape, requests=24, json_output=True) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["exact_prompts"] == summary["prompts"] == 24
    assert summary["exact_checked"] == summary["checked"] == 72
    assert summary["nonzero_checked"] > 0
