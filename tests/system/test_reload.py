# SPDX-License-Identifier: Apache-2.0
"""Settings, keys of engines and limits change without a restart, in all processes of a router and while requests run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrouter.replay.traces.formats import read_trace
from kvrouter.router.model.config.settings import Config
from tests.support.clinic import Clinic
from tests.support.exchange import exchange, port_of
from tests.support.fleet import until
from tests.support.replica_process import MODEL, ReplicaProcess
from tests.support.router_process import RouterProcess, end_process

# A part of every key, so that one search finds any of them.
MARK = "Hush"
OLD, NEW, LAST = f"{MARK}-old-key", f"{MARK}-new-key", f"{MARK}-last-key"
PROMPT = {"prompt": list(range(40)), "max_tokens": 1}


def written(file: Path, text: str) -> None:
    """Put a text in place of the file at once, as ConfigMaps and editors do."""
    other = file.with_suffix(".next")
    other.write_text(text)
    other.rename(file)


def status_of(router: RouterProcess, model: str, key: str | None = None) -> int:
    """Send a completion over a new connection, so that any of the processes may get it, and return the status."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return exchange(router.port, "POST", "/v1/completions", PROMPT | {"model": model}, headers).status


def holds(check: Callable[[], bool], times: int = 12) -> bool:
    """Return whether a check holds this many times in a row, each time at any of the processes."""
    return all(check() for _ in range(times))


def shows_second(router: RouterProcess, began_s: float) -> bool:
    """Return whether any of the processes shows the second file, of which a part waits for a restart."""
    answer = exchange(router.port, "GET", "/settings").json()
    settings = answer["settings"]
    return (
        (settings["model_aliases"], settings["queue_size"]) == (["second=sim"], 3)
        and settings["decisions_kept"] == Config().decisions_kept
        and answer["waiting"] == ["decisions_kept"]
        and began_s <= answer["reloaded_s"] <= time.time()
    )


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[ReplicaProcess]:
    with ReplicaProcess(tmp_path / "replica", ["--instant", "--model", MODEL]) as process:
        yield process


def test_all_processes_apply_what_can_change_and_name_the_rest(tmp_path: Path, replica: ReplicaProcess) -> None:
    file = tmp_path / "k.yaml"
    workers = f"workers: [{json.dumps(replica.spec('w0'))}]\n"
    file.write_text("model_aliases: [first=sim]\n" + workers)
    with RouterProcess(tmp_path / "router", ["--config", str(file), "--processes", "2"]) as router:
        log = tmp_path / "router" / "router.log"
        until(lambda: "listens on" in log.read_text(), "both processes have started")
        assert holds(lambda: status_of(router, "first") == 200)
        began_s = time.time()
        assert router.request("GET", "/settings")["reloaded_s"] is None
        written(file, "model_aliases: [second=sim]\nqueue_size: 3\ndecisions_kept: 3\n" + workers)
        until(lambda: read_by_both(router, "settings", 1), "both processes have the new alias")
        assert holds(lambda: status_of(router, "second") == 200)
        assert holds(lambda: status_of(router, "first") == 404)
        clinic = Clinic(router)
        assert holds(lambda: shows_second(router, began_s))
        assert "decisions_kept" in clinic.find("KV012", "router").evidence
        health = router.request("GET", "/health")
        assert health["status"] == "ok" and "decisions_kept" in str(health["warnings"])
        assert "queue_size" not in str(health["warnings"])
        # A wrong file changes nothing, in any process.
        written(file, "model_aliases: [third]\n" + workers)
        until(
            lambda: holds(lambda: b"model_aliases" in exchange(router.port, "GET", "/health").content),
            "the file is named as wrong",
        )
        assert holds(lambda: status_of(router, "second") == 200)
        written(file, "model_aliases: [third=sim]\n" + workers)
        until(lambda: read_by_both(router, "settings", 2), "a correct file is read again")
        assert holds(lambda: status_of(router, "third") == 200)
        until(lambda: "KV012" not in clinic.codes(), "the value of the start is back")
        # A signal reads the file at once, in each process, and ends none.
        router.signal(signal.SIGHUP)
        until(lambda: read_by_both(router, "settings", 3), "both have read it")
        assert log.read_text().count("files are read again") == 2
        assert holds(lambda: status_of(router, "third") == 200)


def test_limits_hold_for_the_next_request(tmp_path: Path, replica: ReplicaProcess) -> None:
    file = tmp_path / "k.yaml"
    workers = f"workers: [{json.dumps(replica.spec('w0'))}]\n"
    file.write_text(workers)
    with RouterProcess(tmp_path / "router", ["--config", str(file)]) as router:
        until(lambda: status_of(router, MODEL) == 200, "it serves")

        def taken() -> float:
            return router.metric("kvrouter_access_reloads_total", file="settings", outcome="taken")

        written(file, "queue_size: 0\nsaturation_tokens: 1\n" + workers)
        until(lambda: taken() == 1, "the first change")
        replica.faults(stall_s=3_600)
        statuses: list[int] = []
        waiting = threading.Thread(target=lambda: statuses.append(status_of(router, MODEL)))
        waiting.start()
        # The first prompt saturates its worker, and nobody may wait behind it.
        until(lambda: runs_one(replica), "the first is under way")
        assert status_of(router, MODEL) == 429
        written(file, "answer_timeout_s: 0.5\n" + workers)
        until(lambda: taken() == 2, "the second change")
        assert status_of(router, MODEL) == 504, "it would wait for ten minutes"
        replica.kill()
        waiting.join()
        assert statuses[0] >= 500


def runs_one(replica: ReplicaProcess) -> bool:
    page = exchange(port_of(replica.endpoints["url"]), "GET", "/metrics").content.decode()
    return bool(re.search(r"^vllm:num_requests_running\{.*\} 1(\.0)?$", page, re.MULTILINE))


@contextmanager
def traffic(router: RouterProcess, model: str) -> Iterator[list[int]]:
    """Send requests one after the other until the end of the block; yield the list of their statuses."""
    statuses: list[int] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            statuses.append(status_of(router, model))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()


def test_the_key_of_an_engine_is_rotated_under_load(tmp_path: Path, replica: ReplicaProcess) -> None:
    keys, workers = tmp_path / "keys.yaml", tmp_path / "workers.yaml"
    keys.write_text(f"default: {MARK}-of-others\nteam: {OLD}\n")
    # The address alone: the model and the events are queried, with the key.
    url = replica.endpoints["url"]
    workers.write_text(f"- {{worker_id: w0, url: '{url}', engine_key: team}}\n")
    replica.faults(api_keys=[OLD])
    flags = ["--workers-file", str(workers), "--worker-api-keys-file", str(keys), "--processes", "2"]
    with RouterProcess(tmp_path / "router", flags) as router:
        log = tmp_path / "router" / "router.log"
        until(lambda: "listens on" in log.read_text(), "both processes have started")
        until(lambda: holds(lambda: status_of(router, MODEL) == 200), "the engine takes the key that its worker names")
        with traffic(router, MODEL) as statuses:
            # vLLM takes several keys: both are good until the router has the new one.
            replica.faults(api_keys=[OLD, NEW])
            written(keys, f"team: {NEW}\n")
            before = len(statuses)
            until(lambda: read_by_both(router, "worker_api_keys", 1), "both processes have the new key")
            replica.faults(api_keys=[NEW])
            until(lambda: len(statuses) > before + 20, "requests go on")
        assert set(statuses) == {200}
        # An engine that takes one key at a time refuses the old one a moment before the router has looked at the file.
        written(keys, f"team: {LAST}\n")
        replica.faults(api_keys=[LAST])
        assert holds(lambda: status_of(router, MODEL) == 200)
        # A name without a key gets none, and is named.
        written(keys, f"default: {LAST}\n")
        until(lambda: "engine key team" in router.text("/health"), "the missing key is named")
        until(lambda: holds(lambda: status_of(router, MODEL) == 401), "no process has the key")
        written(keys, "team: [\n")
        until(lambda: "KV010" in Clinic(router).codes(), "the wrong file is a finding")
        written(keys, f"team: {LAST}\n")
        until(lambda: holds(lambda: status_of(router, MODEL) == 200), "the key is back")
        assert router.worker("w0")["worker_id"] == "w0"
        shown = [router.text(path) for path in ("/workers", "/health", "/metrics", "/diagnosis", "/store")]
        with router.store() as store:
            shown += [str(store.hgetall(key)) for key in store.scan_iter("*") if store.type(key) == b"hash"]
        assert any("engine_key" in text and "team" in text for text in shown), "the name is stored"
    shown.append(log.read_text())
    assert not [text for text in shown if MARK in text]


def read_by_both(router: RouterProcess, file: str, times: int) -> bool:
    """Return whether each of both processes has taken a file's content this often after its start.

    Requests do not show it: on a busy machine, one process may accept all of them.
    """
    labels = {"file": file, "outcome": "taken"}
    return all(router.metric("kvrouter_access_reloads_total", process=process, **labels) == times for process in "01")


@pytest.mark.parametrize(("flags", "status"), [(["--allow-host", "127.0.0.1"], 200), ([], 401)])
def test_a_client_names_a_key_for_a_listed_host_alone(
    tmp_path: Path, replica: ReplicaProcess, flags: list[str], status: int
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"team: {OLD}\n")
    replica.faults(api_keys=[OLD])
    body = {"worker_id": "w0", "model": MODEL, "url": replica.endpoints["url"], "engine_key": "team"}
    with RouterProcess(tmp_path / "router", ["--worker-api-keys-file", str(keys), *flags]) as router:
        router.request("POST", "/register", body)
        until(lambda: status_of(router, MODEL) == status, str(status))
        assert ("worker_api_key is not sent" in router.text("/health")) == (status == 401)


def test_the_access_log_names_the_key_of_a_request(tmp_path: Path, replica: ReplicaProcess) -> None:
    keys = tmp_path / "keys.yaml"
    secret = f"{MARK}-key-of-a-client"
    keys.write_text(f"keys: [{{name: team-a, scopes: [proxy], key: {secret}}}]\n")
    flags = ["--worker", replica.spec("w0"), "--api-keys-file", str(keys), "--access-log", "on", "--log-format", "json"]
    with RouterProcess(
        tmp_path / "router", flags, {"KVROUTER_API_KEY": f"{MARK}-admin"}, api_key=f"{MARK}-admin"
    ) as router:
        for key in (secret, f"{MARK}-admin"):
            until(lambda key=key: status_of(router, MODEL, key) == 200, "sent")  # type: ignore[misc]
    log = tmp_path / "router" / "router.log"
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    names = {line["key"] for line in lines if line.get("logger") == "kvrouter.access"}
    assert names == {"team-a", "api_key"} and MARK not in log.read_text()
    assert len(read_trace(log, "access").requests) >= 2


def begin_at(terminal: int) -> None:
    """Make the terminal that of this process. `nohup`, under which the tests may run, has SIGHUP ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_end_of_its_terminal_ends_a_router_and_a_signal_does_not(tmp_path: Path, processes: str) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", "0", "--processes", processes]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path / "data")],
            stdin=terminal,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(begin_at, terminal),
        )
    os.close(terminal)
    try:
        until(lambda: "listens on" in log.read_text(), "it serves")
        process.send_signal(signal.SIGHUP)
        until(lambda: log.read_text().count("files are read again") == int(processes), "it has read the files")
        assert process.poll() is None
        os.close(controller)
        until(lambda: process.poll() is not None, "it has ended")
        assert process.returncode == 0 and "stopped" in log.read_text()
    finally:
        if process.poll() is None:
            end_process(process)
