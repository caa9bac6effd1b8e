# SPDX-License-Identifier: Apache-2.0
"""`kvrouter serve --processes N`: one port, one private store, one life."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from churn import Churn
from fleet import register, rows, until, wait_seqs, wrong_answers
from router_process import RouterProcess

ENGINES = 5
COUNT = 3


def processes(router: RouterProcess) -> set[int]:
    """The ids of the processes behind the port."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(router.pid)], capture_output=True, text=True, check=False
    )
    return {int(line.split()[0]) for line in listed.stdout.splitlines() if "kvrouter.router.server.supervisor" in line}


def samples(text: str, name: str) -> dict[str, float]:
    """Values by the process that has them."""
    return {process: float(value) for process, value in re.findall(rf'^{name}{{process="(\d)"}} (\S+)$', text, re.M)}


def ask_all(router: RouterProcess, churn: Churn, truth: dict[str, object]) -> None:
    """Every process answers rightly: connections are spread over them, so some are made again."""
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
        # What each counted, not what chance showed: every batch once, in one process.
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
            # Meant to be there for the next router; here there is none.
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
