# SPDX-License-Identifier: Apache-2.0
"""`kvrouter serve --processes N`: one port, one private store, one life."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.churn import Churn
from tests.support.event_reader import EventReader
from tests.support.fleet import MODEL, register, rows, until, wait_seqs, wrong_answers
from tests.support.router_process import RouterProcess

ENGINES = 5
COUNT = 3


def processes(router: RouterProcess) -> set[int]:
    """Return the ids of the processes behind the port."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(router.pid)], capture_output=True, text=True, check=False
    )
    return {
        int(line.split()[0]) for line in listed.stdout.splitlines() if "kvrouter.router.app.server.supervisor" in line
    }


def samples(text: str, name: str) -> dict[str, float]:
    """Return the values of a metric by the process that has them."""
    return {process: float(value) for process, value in re.findall(rf'^{name}{{process="(\d)"}} (\S+)$', text, re.M)}


def ask_all(router: RouterProcess, churn: Churn, truth: dict[str, object]) -> None:
    """Check that every process answers correctly.

    Connections are spread over the processes, so some are made again.
    """
    for _ in range(4 * COUNT):
        assert not wrong_answers(router, churn, truth)
        router.reconnect()


def test_several_processes_are_one_router(tmp_path: Path) -> None:
    arguments = ["--processes", str(COUNT), "--data-dir", str(tmp_path / "data")]
    with Churn(ENGINES, 3_000) as churn, RouterProcess(tmp_path, arguments) as router:
        assert until(lambda: router.log_tail().count("listens on"), "no line says that it listens") == 1
        register(router, churn)
        churn.ask("go")
        until(
            lambda: sorted(samples(router.text("/metrics"), "kvrouter_leases_held").values()) == [1, 2, 2],
            "uneven shares",
        )
        seqs = dict(zip(churn.workers, churn.ask("pause"), strict=True))
        truth = churn.ask("dump")
        for _ in range(2 * COUNT):
            wait_seqs(router, seqs)
            router.reconnect()
        ask_all(router, churn, truth)
        text = router.text("/metrics")
        assert "kvrouter_processes_answering 3.0" in text
        # The page has the counts of all processes, and not of one that chance picked: every batch once, in one process.
        batches = sum(float(v) for v in re.findall(r"^kvrouter_ingest_batches_total{.*} (\S+)$", text, re.M))
        assert batches == sum(seqs.values()) + ENGINES

        victim = sorted(processes(router))[1]
        assert len(processes(router)) == COUNT
        churn.ask("go")
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(processes(router) - {victim}) == COUNT, "a process that ended is not started again")
        until(
            lambda: sorted(samples(router.text("/metrics"), "kvrouter_leases_held").values()) == [1, 2, 2],
            "uneven shares",
        )
        seqs = dict(zip(churn.workers, churn.ask("pause"), strict=True))
        truth = churn.ask("dump")
        for _ in range(2 * COUNT):
            wait_seqs(router, seqs)
            router.reconnect()
        ask_all(router, churn, truth)
        assert len(rows(router)) == ENGINES


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_all_end_with_the_supervisor(how: signal.Signals, tmp_path: Path) -> None:
    with RouterProcess(tmp_path, ["--processes", "2", "--data-dir", str(tmp_path / "data")]) as router:
        until(lambda: router.log_tail().count("listens on"), "no line says that it listens")
        children = processes(router)
        assert len(children) == 2
        store = int((tmp_path / "data" / "valkey.pid").read_text())
        router.signal(how)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "processes stay", 20.0)
        if how == signal.SIGKILL:
            # The store stays for the next router. There is none here, so end it.
            os.kill(store, signal.SIGTERM)
        else:
            assert router.wait() == 0
        assert "Traceback" not in router.log_tail()


def test_a_process_that_cannot_start_ends_all(tmp_path: Path) -> None:
    arguments = ["--processes", "2", "--redis", "redis://127.0.0.1:1/0"]
    with pytest.raises(AssertionError) as raised, RouterProcess(tmp_path, arguments):
        pass
    assert "127.0.0.1:1 cannot be reached" in str(raised.value)
    assert "kvrouter: process 0 of the router did not start" in str(raised.value)


def test_any_process_explains_a_decision_of_another_and_shows_it(tmp_path: Path) -> None:
    arguments = ["--processes", "2", "--data-dir", str(tmp_path / "data")]
    with Churn(2, 500) as churn, RouterProcess(tmp_path, arguments) as router, ExitStack() as stack:
        register(router, churn)
        churn.ask("go")
        seqs = dict(zip(churn.workers, churn.ask("pause"), strict=True))
        wait_seqs(router, seqs)
        readers: list[EventReader] = []

        def lives() -> set[str]:
            """Connect one more reader, and return the lives of the processes that the readers are connected to."""
            readers.append(stack.enter_context(EventReader(router.port, "?type=decision")))
            until(lambda: readers[-1].last_id, "it watches")
            return {reader.last_id.partition("-")[0] for reader in readers}

        until(lambda: len(lives()) == 2, "each process is watched")
        until(
            lambda: samples(router.text("/metrics"), "kvrouter_load_routers") == {"0": 2, "1": 2},
            "they hear each other",
        )
        chosen = router.request("POST", "/select", {"model": MODEL, "token_ids": [1, 2, 3]})
        name = chosen["selection_id"]
        for _ in range(20):
            router.reconnect()
            assert router.request("GET", f"/decisions/{name}")["reason"] == chosen["reason"]
            reply = router.request("GET", f"/decisions?worker={chosen['worker_id']}&limit=5")
            assert [entry["selection_id"] for entry in reply["decisions"]] == [name]
            assert (reply["kept"], reply["searched"]) == (1, 1)
            assert router.request("GET", "/decisions?only=failed")["decisions"] == []
        until(lambda: all(reader.events for reader in readers), "all see it")
        assert {event["selection_id"] for reader in readers for event in reader.events} == {name}
        assert all(len(reader.events) == 1 for reader in readers)
