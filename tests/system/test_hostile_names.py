# SPDX-License-Identifier: Apache-2.0
"""Names are data: no answer, metric, log line, terminal or key takes the name of a worker or model for more."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.router.base.common.ids import WorkerKey
from tests.support.exchange import exchange, run_cli
from tests.support.fake_engine import FakeEngine, prompt, stored
from tests.support.router_process import RouterProcess
from tests.support.store_server import wait_stored

HOSTILE = [
    "}",
    "{m/w0}",
    "m}:workers",
    "{",
    "a/b:c@1",
    "w0@1",
    "%7Bm%2Fw0%7D",
    "..",
    "../../etc/passwd",
    "a\r\nFLUSHALL\r\n",
    "x\n2026-01-01T00:00:00.000+00:00 INFO    registered worker=m/forged",
    'y", "level": "error", "z": "',
    "<script>alert(1)</script>",
    "[bold red]rich[/bold red]",
    "[/]",
    "{worker}%s%n{0}",
    "nul\0byte",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31mC1",
    "\u202egnp.exe",
    "\u2066isolated\u2069",
    "line\u2028sep\u2029para\x85nel\x0bvt\x0cff",
    'le="0.5"} 1\nkvrouter_forged_total{worker="w',
    'back\\slash"quote\\',
    "\U000e0041tag",
    "\ufeffbom\u200bzero",
    " w0",
    "ä\u0301ö 名前 🙂",
    "*",
    "w0?",
    "kvr:models",
]
# Names in HOSTILE that would be taken for a rank of another worker.
RANKED = ["a/b:c@1", "w0@1"]
REFUSED = ["", " \t\n", "x" * 513, "x" * 10_000, "lone\ud800surrogate", "\udfff"]
TOKENS = prompt(1)


def post(router: RouterProcess, path: str, body: object, method: str = "POST") -> tuple[int, Any]:
    answer = exchange(router.port, method, path, body)
    return answer.status, answer.json()


def command(router: RouterProcess, *arguments: str) -> str:
    done = run_cli(*arguments, "--url", f"http://127.0.0.1:{router.port}")
    return done.stdout + done.stderr


def is_safe(shown: str) -> bool:
    return all(c.isprintable() for line in shown.split("\n") for c in line)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_names_are_data_everywhere(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine], log_format: str
) -> None:
    # Use each name for a worker of model m, and for a model with a worker w0.
    named = [("m", name) for name in HOSTILE if name not in RANKED] + [(name, "w0") for name in HOSTILE]
    arguments = ["--log-format", log_format, "--log-level", "debug"]
    with RouterProcess(tmp_path, arguments) as router, router.store() as store:
        for model, worker_id in named:
            # An id is one worker, whatever its model, so each w0 gets its own rank. Otherwise each would replace the
            # one before.
            dp_rank = HOSTILE.index(model) if worker_id == "w0" else 0
            # Each worker has its own engine, because two workers on one event endpoint contradict each other.
            engine = FakeEngine(context, replay=False)
            engine.dp_rank = dp_rank
            engines.append(engine)
            body = engine.registration(worker_id, model, dp_rank=dp_rank, patch_endpoint="off")
            assert post(router, "/register", body)[0] == 200, (model, worker_id)
        for name in REFUSED:
            for body in ({"worker_id": name, "model": "m"}, {"worker_id": "w9", "model": name}):
                status, answer = post(router, "/register", engine.registration("w", "m") | body)
                assert status == 400 and len(answer["error"]["message"]) < 1_000, name
            assert post(router, "/unregister", {"worker_id": name})[0] in (400, 404)
        for name in RANKED:
            status, answer = post(router, "/register", engine.registration(name, "m"))
            assert status == 400 and "dp_rank=1" in answer["error"]["message"], answer

        rows = router.request("GET", "/workers")["workers"]
        assert sorted((row["model"], row["worker_id"]) for row in rows) == sorted(named)
        deadline = time.monotonic() + 60
        while any(row["state"] in ("connecting", "down") for row in rows):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            rows = router.request("GET", "/workers")["workers"]
        for engine in engines:
            engine.wait_subscribed()
        # This is the first message of each engine.
        seq = 0
        assert {engine.publish(stored(TOKENS, 0, 4)) for engine in engines} == {seq}
        while not all(row["seq"] == seq for row in rows):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            rows = router.request("GET", "/workers")["workers"]

        wait_stored(store, {WorkerKey(row["model"], row["worker_id"], row["dp_rank"]): seq for row in rows})

        # Each worker has its own keys, which share one hash tag that no other worker has.
        before = {key.decode("ascii") for key in store.scan_iter(count=1_000)}
        owned: dict[str, set[str]] = {}
        for key in before:
            if "/" in key:
                assert key.count("{") == key.count("}") == 1
                owned.setdefault(key[: key.index("}")], set()).add(key)
        assert len(owned) == len(named)
        assert all(
            {key.rpartition(":")[2] for key in keys} == {"copies", "lease", "log", "meta"} for keys in owned.values()
        ), owned

        for model, worker_id in named:
            answer = post(router, "/query", {"model": model, "token_ids": TOKENS})[1]["instances"]
            assert answer[worker_id]["gpu"] > 0
        for body in (
            {"model": "\x1b[2J\n", "token_ids": [1]},
            {"model": "m", "token_ids": [1], "workers": ["\u202e"]},
        ):
            assert is_safe(post(router, "/query", body)[1]["error"]["message"])
        for path in ("/%1b%5b2J", "/workers%0a", "/query/%e2%80%ae"):
            assert is_safe(post(router, path, {})[1]["error"]["message"])
        assert all(is_safe(reason) for reason in router.request("GET", "/health")["reasons"])

        with urllib.request.urlopen(f"http://127.0.0.1:{router.port}/metrics") as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        assert "kvrouter_forged" not in families
        labels = {sample.labels["worker"] for sample in families["kvrouter_ingest_batches"].samples}
        assert len({name for name in labels if not name.startswith("w0@")}) >= len(HOSTILE) - 2 - len(RANKED)
        assert all(is_safe(name) for name in labels)

        shown = command(router, "workers")
        assert is_safe(shown)
        assert "<script>" in shown and "[bold red]rich[/bold red]" in shown
        assert len(json.loads(command(router, "workers", "--json"))["workers"]) == len(named)
        assert is_safe(command(router, "workers", "--json"))
        (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)))
        for model in ("m", "\x1b[2J\u202e", HOSTILE[10], HOSTILE[17]):
            assert is_safe(command(router, "explain", f"--model={model}", "--tokens", str(tmp_path / "tokens")))

        # Unregistering a worker deletes exactly that worker's keys.
        for number, (model, worker_id) in enumerate(named):
            rank = HOSTILE.index(model) if worker_id == "w0" else 0
            if number % 2 and worker_id not in ("", ".."):
                path = f"/workers/{quote(worker_id, safe='')}?dp_rank={rank}&model={quote(model, safe='')}"
                status, answer = post(router, path, {}, "DELETE")
            else:
                body = {"worker_id": worker_id, "model": model, "dp_rank": rank}
                status, answer = post(router, "/unregister", body)
            assert (status, answer.get("dropped")) == (200, 1), (model, worker_id, answer)
            after = {key.decode("ascii") for key in store.scan_iter(count=1_000)}
            gone = {key for key in before - after if "/" in key}
            assert gone in owned.values(), (model, worker_id)
            assert not after - before
            before = after
        assert not [key for key in before if "/" in key or "workers" in key]
        log = (tmp_path / "router.log").read_text()
    check_log(log, log_format, len(named))


def check_log(log: str, log_format: str, workers: int) -> None:
    # Leave out the first line, which the start prints on stdout.
    lines = [line for line in log.split("\n") if line and not line.startswith("kvrouter ")]
    assert is_safe(log)
    if log_format == "json":
        entries = [json.loads(line) for line in lines]
        assert sum(entry["message"] == "registered" for entry in entries) == workers
        assert all(entry["level"] != "error" for entry in entries)
    else:
        assert all(line[:4].isdigit() and line[23:29] == "+00:00" for line in lines), lines
        assert sum(" INFO    registered worker=" in line for line in lines) >= workers
        assert sum(line[30:].startswith("INFO    registered ") for line in lines) == workers
