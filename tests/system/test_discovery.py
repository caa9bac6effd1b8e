# SPDX-License-Identifier: Apache-2.0
"""Discovery of workers that nobody registered, in whole routers.

The routers have flags and files alone; simulated engines report the rest.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.router.app.cli.commands import run
from kvrouter.router.model.workers.registration import BASE_PATH_LEFT_OUT
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer
from tests.support.fleet import rows
from tests.support.ports import free_port
from tests.support.quiet_server import QuietServer
from tests.support.replica_process import served
from tests.support.router_process import RouterError, RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain
from tests.support.store_server import StoreServer

MODEL = "sim"
TIMEOUT_S = 30.0


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with contextlib.suppress(RouterError):
            if result := condition():
                return result
        assert time.monotonic() < deadline, f"not in {TIMEOUT_S:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture
def replicas(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[list[ReplicaServer]]:
    servers = [ReplicaServer(make_geometry("llama"), 64, context=context, model=MODEL) for _ in range(2)]
    with served(*servers):
        yield servers


def said(router: RouterProcess) -> str:
    return " | ".join(router.request("GET", "/health")["reasons"])


def live(router: RouterProcess, *names: str) -> Callable[[], Any]:
    def look() -> Any:
        workers = rows(router)
        good = set(workers) == set(names) and all(row["state"] != "connecting" for row in workers.values())
        return workers if good else None

    return look


def write(file: Path, text: str) -> None:
    """Replace the file at once, as a careful writer does."""
    other = file.with_suffix(".new")
    other.write_text(text)
    other.rename(file)


def test_an_address_is_enough(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    engine = replicas[0].endpoints
    with RouterProcess(tmp_path, ["--worker", f"w0={engine['url']}"]) as router:
        row = until(lambda: rows(router).get("w0"), "registered")
        assert (row["model"], row["source"], row["approximate"]) == (MODEL, "static", False)
        router.wait_connected("w0")
        # The router follows the engine's events, so it learns of a prompt that the engine computed.
        tokens = list(range(64))
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
        assert router.request("POST", "/v1/completions", body)["usage"]["prompt_tokens"] == 64
        until(lambda: router.query(MODEL, "w0", tuple(tokens), None)["gpu"] >= 48, "its blocks are known")
        until(lambda: router.metric("kvrouter_discovery_up", source="static") == 1, "shown as up")


def test_what_a_source_keeps_is_changed_there(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"- {{worker_id: w0, url: {replicas[0].endpoints['url']}}}\n")
    with RouterProcess(tmp_path / "r", ["--workers-file", str(file)]) as router:
        row = until(live(router, "w0"), "registered")["w0"]
        assert row["source"] == "file"
        same = {"worker_id": "w0", "model": MODEL, "url": row["url"], "endpoint": replicas[0].endpoints["events"]}
        for method, path, body in (
            ("DELETE", "/workers/w0", None),
            ("POST", "/unregister", {"worker_id": "w0"}),
            ("PATCH", "/workers/w0", {"block_size": 16}),
            ("POST", "/register", {**same, "url": "http://127.0.0.1:1"}),
        ):
            with pytest.raises(RouterError, match=r"gave 409.*kept_by_source"):
                router.request(method, path, body)
        router.request("PATCH", "/workers/w0", {"state": "draining"})
        time.sleep(2.5)
        assert rows(router)["w0"]["draining"], "the source must leave a client's word alone"
        # Registering the same worker in other words changes nothing, so engines can go on registering themselves.
        router.request("POST", "/register", {**same, "replay_endpoint": replicas[0].endpoints["replay"]})
        router.request("PATCH", "/workers/w0", {"state": "active"})
        write(file, "[]\n")
        until(lambda: not rows(router), "gone with its line")


def test_the_command_line_adds_and_removes_workers(
    tmp_path: Path, replicas: list[ReplicaServer], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (replica.endpoints["url"] for replica in replicas)
    file = tmp_path / "workers.yaml"
    file.write_text(f"workers:\n- {first}\n- w9=http://127.0.0.1:9\n")
    listed = first.removeprefix("http://")
    with RouterProcess(tmp_path / "r", ["--workers-file", str(file)]) as router:
        until(lambda: rows(router).get(listed, {"model": ""})["model"], "registered under its host and port")

        def kvrouter(*words: str) -> tuple[int, str]:
            code = run([*words, "--url", f"localhost:{router.port}"])
            return code, "".join(capsys.readouterr())

        code, text = kvrouter("add", f"w1={second}/v1")
        assert code == 0 and text.startswith(f"w1 (model {MODEL}) is registered at {second}; its state is ")
        assert BASE_PATH_LEFT_OUT in text
        assert kvrouter("add", f"w1={second}")[0] == 0
        code, text = kvrouter("add", f"w1={first}")
        assert code == 1 and f"is there already, with url {second}: `kvrouter remove w1` first" in text
        assert kvrouter("remove", "w1")[0] == 0 and set(rows(router)) == {listed, "w9"}
        assert kvrouter("remove", "w1") == (
            1,
            "kvrouter: no worker 'w1' is registered; GET /workers lists those that are\n",
        )
        code, text = kvrouter("remove", listed)
        assert code == 1 and "would come back at once: take it out of the file of the setting workers_file" in text
        code, text = kvrouter("remove", "w9")
        assert (code, text) == (
            1,
            "kvrouter: worker 'w9' is not registered yet: change it in the file of the setting workers_file\n",
        )
        code, text = kvrouter("add", f"w9={second}")
        assert code == 1 and "change it in the file of the setting workers_file, or choose another id" in text
        kvrouter("drain", listed)
        answer = router.request("PATCH", f"/workers/{listed}", {"state": "draining"})
        assert answer["draining"] and answer["draining_s"] >= 0 and answer["lifecycle"] == "incomplete"
        assert rows(router)[listed]["draining_s"] is not None


def test_a_file_is_followed_and_a_wrong_one_changes_nothing(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    first, second = (replica.endpoints["url"] for replica in replicas)
    file = tmp_path / "workers.yaml"
    file.write_text(f"- w0={first}\n")
    with RouterProcess(tmp_path / "r", ["--workers-file", str(file)]) as router:
        until(live(router, "w0"), "the first")
        epoch = until(lambda: rows(router)["w0"]["epoch"], "its stream began")
        write(file, f"- w0={first}\n- worker_id: w1\n  url: {second}\n")
        until(live(router, "w0", "w1"), "the second")
        file.write_text(f"- w0={first}\n- worker_id: w1\n  urll: {second}\n")
        until(lambda: "source file is down" in said(router), "told")
        assert f"{file} line 3: urll is not a field of a worker; did you mean url?" in said(router)
        assert set(rows(router)) == {"w0", "w1"}
        until(lambda: router.metric("kvrouter_discovery_up", source="file") == 0, "shown as down")
        file.unlink()
        until(lambda: "put it back" in said(router), "it is reported as gone")
        write(file, f"- w0={first}\n")
        until(live(router, "w0"), "the second went")
        assert "source file" not in said(router)
        assert rows(router)["w0"]["epoch"] == epoch, "what did not change is not touched"


def test_the_settings_file_is_followed_for_its_workers(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    first, second = (replica.endpoints["url"] for replica in replicas)
    file = tmp_path / "k.yaml"
    file.write_text(f"decisions_kept: 7\nworkers: [w0={first}]\n")
    with RouterProcess(tmp_path / "r", ["--config", str(file)]) as router:
        assert until(live(router, "w0"), "the first")["w0"]["source"] == "config"
        write(file, f"decisions_kept: 8\nlog_level: debug\nworkers: [w1={second}]\n")
        until(live(router, "w1"), "the other")
        log = router.log_tail()
        assert log.count("settings changed: restart the router to apply them") == 1
        assert "decisions_kept" in log and "log_level" in log
        write(file, f"queue_size: eight\nworkers: [w0={first}]\n")
        until(lambda: "queue_size" in said(router), "told")
        assert set(rows(router)) == {"w1"}, "never half"


def test_a_router_that_was_down_drops_what_went_meanwhile(
    tmp_path: Path, server: StoreServer, replicas: list[ReplicaServer]
) -> None:
    first, second = (replica.endpoints["url"] for replica in replicas)
    file = tmp_path / "workers.json"
    file.write_text(json.dumps([f"w0={first}", f"w1={second}"]))
    arguments = ["--redis", server.url, "--workers-file", str(file)]
    with RouterProcess(tmp_path / "r", arguments) as router:
        until(live(router, "w0", "w1"), "both")
        router.request("POST", "/register", {"worker_id": "own", "model": MODEL, "url": "http://127.0.0.1:1"})
        router.kill()
    write(file, json.dumps([f"w0={first}"]))
    with RouterProcess(tmp_path / "r", arguments) as router:
        until(lambda: set(rows(router)) == {"w0", "own"}, "the one that went is dropped, a client's stays")


def test_of_several_processes_one_has_the_sources(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"- w0={replicas[0].endpoints['url']}\n")
    with RouterProcess(tmp_path / "r", ["--workers-file", str(file), "--processes", "2"]) as router:
        until(lambda: set(rows(router)) == {"w0"}, "registered")
        write(file, f"- w1={replicas[1].endpoints['url']}\n")
        for _ in range(8):
            router.reconnect()
            until(lambda: set(rows(router)) == {"w1"}, "followed in all processes")


def test_an_engine_that_does_not_tell_is_named(tmp_path: Path) -> None:
    # The engine's socket accepts connections, but nothing answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        arguments = ["--worker", f"w0=http://127.0.0.1:{silent.getsockname()[1]},model=m"]
        with RouterProcess(tmp_path, arguments) as router:
            until(lambda: rows(router).get("w0", {}).get("approximate"), "registered, and its blocks are guessed")
            row = rows(router)["w0"]
        assert "where its KV events are is not known" in row["reason"] and "write events=" in row["reason"]


class NotFound(BaseHTTPRequestHandler):
    """The default backend of an ingress, for paths that no service has."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def default_backend() -> Iterator[str]:
    with QuietServer(("127.0.0.1", 0), NotFound) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_where_no_engine_answers_is_named_and_stops_nothing(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    message = "/v1/models answers 404): write http://HOST:PORT of the engine itself"
    file = tmp_path / "workers.yaml"
    file.write_text("[]\n")
    with default_backend() as nothing:
        # Give the base URL of an OpenAI client, once for an engine and once for no engine.
        flags = ["--worker", f"w0={replicas[0].endpoints['url']}/v1", "--worker", f"w1={nothing}/v1"]
        with RouterProcess(tmp_path / "r", [*flags, "--workers-file", str(file)]) as router:
            until(live(router, "w0", "w1"), "listed")
            assert rows(router)["w0"]["url"] == replicas[0].endpoints["url"]
            assert message in rows(router)["w1"]["reason"]
            write(file, f"- w2={nothing}\n- w3={nothing},model=other\n")
            until(lambda: {"w2", "w3"} <= rows(router).keys(), "listed")
            until(lambda: message in rows(router)["w2"]["reason"], "named")
            until(lambda: message in rows(router)["w3"]["reason"], "named")
            with pytest.raises(RouterError, match=r"gave 502.*/v1/models answers 404"):
                router.request("POST", "/register", {"worker_id": "w4", "url": f"{nothing}/v1/"})
            assert router.request("POST", "/v1/completions", {"model": MODEL, "prompt": [1], "max_tokens": 1})[
                "choices"
            ]
            assert "a bug in the router" not in said(router)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- w0=http://h:1\n- {worker_id: a, url: 'ftp://h'}\n", "line 2: url must be an HTTP address"),
        ("w0: http://h:1\n", "line 1 is no list"),
        ("- w0=http://h:1\n- w0=http://h:2\n", "line 2: 'w0' is in line 1 too"),
        ("- {\n", "is not YAML"),
        ("", "is empty"),
    ],
)
def test_a_wrong_file_ends_the_start_with_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(text)
    with pytest.raises(RouterError) as caught, RouterProcess(tmp_path / "r", ["--workers-file", str(file)]):
        raise AssertionError("it started")
    lines = str(caught.value).strip().splitlines()[1:]
    assert len(lines) == 1 and words in lines[0], os.linesep.join(lines)


def test_the_header_of_a_rank_counts_from_the_first_core_behind_the_address(tmp_path: Path) -> None:
    """Ranks 8 and 9 of vLLM's hybrid load balancing: the engine accepts 0 and 1, and names its event streams 8 and 9."""
    streams = {
        str(rank): {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
        for rank in (8, 9)
    }

    async def of_two(asked: Asked, wire: Wire) -> None:
        # vLLM 0.32.0 v1/engine/input_processor.py:396
        is_known = asked.all("x-data-parallel-rank") in ([], ["0"], ["1"])
        await plain(b"{}", "200 OK" if is_known else "400 Bad Request")(asked, wire)

    with ScriptedEngine(of_two) as engine:
        engine.pages["/kv_event_sources"] = plain(json.dumps(streams).encode())
        engine.pages["/v1/models"] = plain(b'{"data": [{"id": "sim", "root": "sim", "parent": null}]}')
        with RouterProcess(tmp_path, ["--worker", f"w0={engine.url}"]) as router:
            listed = lambda: {row["dp_rank"] for row in router.request("GET", "/workers")["workers"]}  # noqa: E731
            until(lambda: listed() == {8, 9}, "both ranks are registered")
            for rank in (8, 9):
                body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
                connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=TIMEOUT_S)
                connection.request("POST", "/v1/completions", json.dumps(body), {"x-kvrouter-worker": f"w0@{rank}"})
                assert connection.getresponse().status == 200
                connection.close()
                assert engine.asked[-1].all("x-data-parallel-rank") == [str(rank - 8)]
                pinned = {"worker_id": "w0", "dp_rank": rank}
                question = {"model": MODEL, "token_ids": [1, 2, 3], "pinned_worker": pinned}
                assert router.request("POST", "/select", question)["request_rank"] == rank - 8
