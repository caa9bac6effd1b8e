# SPDX-License-Identifier: Apache-2.0
"""A long-lived task that ends is named, counted and started again, and only the supervisor starts such tasks."""

from __future__ import annotations

import ast
import asyncio
import random
from collections import Counter as Counts
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrouter.router.base.common.tally import Counter
from kvrouter.router.base.common.task_supervisor import (
    RECENT_S,
    RESTART_FIRST_S,
    RESTART_LAST_S,
    STEADY_S,
    TaskSupervisor,
)

ROOT = Path(__file__).resolve().parents[2]

# Places that start tasks themselves, by file and function, with the reason why each needs no supervisor.
ALLOWED = {
    ("router/base/common/task_supervisor.py", "start"): "the supervisor itself",
    (
        "router/serve/api/http/http_connection.py",
        "_run",
    ): "one answer; its errors are answers, and uvicorn awaits it when it stops",
    ("router/app/server/stopping.py", "unless_stopped"): "the start, awaited at once; its failure ends the process",
    ("router/app/server/stopping.py", "_end_beside"): "awaited by the function that starts it",
    ("router/follow/streams/follower.py", "_take_lease"): "awaited by the function that starts it",
    ("router/follow/streams/follower.py", "hold"): "a TaskGroup: what ends one ends the run of a supervised task",
    ("router/app/server/supervisor.py", "supervise"): "the process itself: awaited, its failure ends it",
    ("router/app/server/supervisor.py", "_run"): "a TaskGroup: what ends one ends the process",
    ("router/model/config/reloaded.py", "watch"): "a TaskGroup: what ends one ends the run of a supervised task",
    (
        "router/route/tokens/engine/verified_engines.py",
        "_begin_judging",
    ): "one judgement; its failure is logged and it is begun again by `look`",
    (
        "router/route/tokens/engine/renderers.py",
        "_begin",
    ): "one verification; its failure is logged and it is begun again by `look`",
    ("router/serve/gateway/grpc_server.py", "_process"): "one read of a stream, which the function awaits or cancels",
    ("router/route/tokens/tokenizer.py", "_ask_once"): "one request; its callers await it",
    ("shadow/shadow_run.py", "run"): "a command: what ends one of them ends it, with the error",
}
STARTERS = {"create_task", "ensure_future", "run_coroutine_threadsafe"}


class Stage:
    """Supervisor on a clock that only its own pauses and the tasks move."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.pauses: list[float] = []
        self.registry = CollectorRegistry()
        self.supervisor = TaskSupervisor(
            clock=lambda: self.now,
            rng=random.Random(1),
            failures=Counter("task_failures_total", "", ["task"], self.registry),
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def failures(self, task: str) -> float | None:
        return self.registry.get_sample_value("task_failures_total", {"task": task})


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(reached: Any) -> None:
    while not reached():
        await asyncio.sleep(0)


async def test_a_task_that_raises_is_logged_counted_named_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("seq is abc")
        await asyncio.Event().wait()

    task = stage.supervisor.start("mirror", work, of="w0\n")
    assert stage.failures("mirror") == 0
    await until(lambda: runs == 2)
    assert stage.failures("mirror") == 1
    (problem,) = stage.supervisor.health()
    assert "mirror of 'w0\\n'" in problem and "ValueError: seq is abc" in problem and "runs again" in problem
    assert "Traceback" in caplog.text and "seq is abc" in caplog.text
    stage.now += RECENT_S + 1
    assert stage.supervisor.health() == []
    await ended(task)


async def test_a_task_that_returns_and_one_whose_wait_is_cancelled_have_failed_too() -> None:
    stage = Stage()
    seen = 0

    async def returns() -> None:
        nonlocal seen
        seen += 1
        if seen > 2:
            await asyncio.Event().wait()

    async def waits() -> None:
        nonlocal seen
        seen += 1
        if seen <= 4:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        await asyncio.Event().wait()

    first = stage.supervisor.start("a", returns)
    await until(lambda: seen == 3)
    second = stage.supervisor.start("b", waits)
    await until(lambda: seen == 5)
    assert (stage.failures("a"), stage.failures("b")) == (2, 1)
    assert len(stage.supervisor.health()) == 2
    for task in (first, second):
        await ended(task)
        assert task.cancelled()
    # No task runs now, so there is nothing to name.
    assert stage.supervisor.health() == []


async def test_pauses_double_to_a_last_and_begin_again_after_a_long_life() -> None:
    stage = Stage()
    lives_s = iter([0.0] * 10 + [STEADY_S + 1] + [0.0] * 3)

    async def work() -> None:
        try:
            stage.now += next(lives_s)
        except StopIteration:
            await asyncio.Event().wait()
        raise OSError

    task = stage.supervisor.start("a", work)
    await until(lambda: len(stage.pauses) == 14)
    for number, pause_s in enumerate(stage.pauses[:10]):
        full_s = min(RESTART_LAST_S, RESTART_FIRST_S * 2**number)
        assert full_s / 2 <= pause_s <= full_s
    assert stage.pauses[10] <= RESTART_FIRST_S
    assert len(set(stage.pauses)) == 14
    # A task that does not run is named, however old its failure is.
    await ended(task)


async def test_a_task_that_is_about_to_be_started_again_is_named() -> None:
    stage = Stage()
    asleep = asyncio.Event()

    async def sleep(_: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    supervisor = TaskSupervisor(clock=lambda: stage.now, rng=random.Random(1), sleep=sleep)

    async def work() -> None:
        raise OSError

    task = supervisor.start("a", work)
    await asleep.wait()
    stage.now += 10 * RECENT_S
    (problem,) = supervisor.health()
    assert "about to be started again" in problem
    await ended(task)


def starts(path: Path) -> list[tuple[str, str]]:
    """Return (file, function) for every call that starts a task."""
    calls = []

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call):
                called = child.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in STARTERS:
                    calls.append((path.relative_to(ROOT).as_posix(), function))
            visit(child, inner)

    visit(ast.parse(path.read_text()), "")
    return calls


def test_no_task_is_started_without_a_supervisor() -> None:
    calls = Counts(
        place for folder in ("router", "shadow") for path in (ROOT / folder).rglob("*.py") for place in starts(path)
    )
    unknown = calls.keys() - ALLOWED.keys()
    assert not unknown, f"start it with TaskSupervisor.start, or say here why it needs none: {sorted(unknown)}"
    assert not ALLOWED.keys() - calls.keys(), "places that no longer start a task"
