# SPDX-License-Identifier: Apache-2.0
"""The lines that a user reads when a router starts: wrong settings at once, a Redis that is away, risks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.router.base.common import compiled
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.exchange import exchange, run_cli
from tests.support.fleet import rows, until
from tests.support.ports import free_port
from tests.support.router_process import RouterError, RouterProcess
from tests.support.store_server import StoreServer

pytestmark = pytest.mark.smoke

MODEL = "sim"


def refused(folder: Path, arguments: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Return the one line with which the start ends, and check that no store was started for it."""
    folder.mkdir(exist_ok=True)
    data_dir = [] if "--redis" in arguments else ["--data-dir", str(folder / "data")]
    flags = ["--port", str(free_port()), *arguments, *data_dir]
    done = run_cli("serve", *flags, env={**os.environ, **(environment or {})}, cwd=folder)
    assert done.returncode != 0 and not done.stdout
    assert not (folder / "data").exists()
    lines = [line for line in done.stderr.strip().splitlines() if (compiled.caution() or "\n") not in line]
    assert len(lines) == 1, lines
    (line,) = lines
    return line


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_wrong_setting_ends_the_start_before_anything_is_started(tmp_path: Path, processes: str) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry.sdk'] = None\n")
    without_traces = {"PYTHONPATH": str(tmp_path / "none")}
    cases: tuple[tuple[list[str], dict[str, str], str], ...] = (
        (["--workers-file", "missing.yaml"], {}, "cannot read missing.yaml"),
        (["--otlp-endpoint", "http://127.0.0.1:1"], without_traces, "otlp_endpoint needs a package"),
        (["--tokenizer", "m=/nowhere"], {}, "--tokenizer m:"),
        (["--redis", "redis://h/0?color=red"], {}, "unknown options ['color']"),
        (["--kubernetes-selector", "app=vllm"], {}, "kubernetes_selector is set, and this is no pod"),
    )
    for number, (arguments, environment, words) in enumerate(cases):
        line = refused(tmp_path / str(number), ["--processes", processes, *arguments], environment)
        assert words in line, line


def test_a_redis_that_cannot_be_reached_is_named_with_what_to_do(tmp_path: Path) -> None:
    port = free_port()
    line = refused(tmp_path, ["--redis", f"redis://user:secret@127.0.0.1:{port}/0"])
    assert f"Redis at redis://***@127.0.0.1:{port}/0: " in line and "start it, or correct the URL (--redis)" in line
    assert "secret" not in line


def health(router: RouterProcess) -> dict[str, Any]:
    answer = router.request("GET", "/health")
    assert isinstance(answer, dict)
    return answer


def warnings(router: RouterProcess) -> list[str]:
    """Return all warnings but the one that the router is not compiled."""
    return [line for line in health(router).get("warnings", []) if line != compiled.caution()]


def test_a_redis_that_evicts_is_a_warning(tmp_path: Path) -> None:
    with StoreServer(tmp_path / "store", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        server.client.acl_setuser(
            "router", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-config"], channels=["*"]
        )
        url = server.url.replace("//", "//router:pw@")
        with RouterProcess(tmp_path / "r", ["--redis", url]) as router:
            (warning,) = until(lambda: warnings(router), "it is not named")
            assert "maxmemory-policy allkeys-lru" in warning and "set maxmemory-policy noeviction" in warning
            until(lambda: health(router)["status"] == "ok", "something else is wrong")
    with RouterProcess(tmp_path / "own") as router:
        assert health(router)["status"] == "ok" and warnings(router) == []


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_router_open_to_all_without_a_key_is_a_warning(tmp_path: Path, host: str, warned: bool) -> None:
    with RouterProcess(tmp_path / "open", ["--host", host]) as router:
        assert any("without an API key" in line for line in health(router).get("warnings", [])) == warned
        assert health(router)["status"] == "ok"
        assert ("without an API key" in router.log_tail()) == warned


def ready(router: RouterProcess) -> tuple[int, str]:
    answer = exchange(router.port, "GET", "/ready")
    return answer.status, answer.json()["error"]["message"] if answer.status != 200 else ""


@pytest.mark.parametrize(
    ("stated", "why"), [("", "its model is not known"), (f",model={MODEL}", "the engine is not up")]
)
def test_an_engine_that_is_not_up_yet_is_a_worker_that_is_down(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], stated: str, why: str
) -> None:
    port = free_port()
    with RouterProcess(tmp_path / "r", ["--worker", f"w0=http://127.0.0.1:{port}{stated}"]) as router:
        until(lambda: rows(router)["w0"]["state"] == "down", "it is not down")
        row = rows(router)["w0"]
        assert (row["credited"], row["source"]) == (False, "static")
        assert why in row["reason"] and f"127.0.0.1:{port}" in row["reason"]
        status, message = ready(router)
        assert status == 503 and "w0" in message and "no worker is registered" not in message
        engine = ServerThread([ReplicaServer(make_geometry("llama"), 64, context=context, model=MODEL, port=port)])
        engine.start()
        try:
            until(lambda: rows(router)["w0"]["state"] == "live", "it does not become live")
            assert rows(router)["w0"]["model"] == MODEL and len(rows(router)) == 1
            assert ready(router)[0] == 200
        finally:
            engine.stop()


def test_a_url_alone_is_registered_as_its_engine_describes_itself(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    replica = ReplicaServer(make_geometry("llama"), 64, context=context, model=MODEL)
    engine = ServerThread([replica])
    engine.start()
    with RouterProcess(tmp_path / "r") as router:
        try:
            endpoints = replica.endpoints
            answer = router.request("POST", "/register", {"worker_id": "w0", "url": endpoints["url"]})
            assert (answer["model_name"], answer["kv_events_endpoint"], answer["replay_endpoint"]) == (
                MODEL,
                endpoints["events"],
                endpoints["replay"],
            )
            until(lambda: rows(router)["w0"]["state"] == "live" and not rows(router)["w0"]["approximate"], "not live")
            # Registering the same again changes nothing. A value that the client names counts.
            assert router.request("POST", "/register", {"worker_id": "w0", "url": endpoints["url"]}) == answer
            router.request("POST", "/register", {"worker_id": "w1", "url": endpoints["url"], "model": "other"})
            assert rows(router)["w1"]["model"] == "other"
        finally:
            engine.stop()
        away = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(RouterError, match=r"502.*engine_not_asked|502.*cannot be reached") as caught:
            router.request("POST", "/register", {"worker_id": "w2", "url": away})
        assert "start the engine, or write model=NAME for this worker" in str(caught.value)
        assert "w2" not in rows(router)
        answer = router.request("POST", "/register", {"worker_id": "w3", "url": away, "model": MODEL})
        assert "where its KV events are is not known" in answer["note"]
