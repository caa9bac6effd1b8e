# SPDX-License-Identifier: Apache-2.0
"""Log calls of the engine patch: vLLM's formatter shows the text of a message and nothing else, so it must say all."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.setup.throttled_log import INTERVAL_S, ThrottledLog

ROOT = Path(__file__).resolve().parents[2] / "engine_patch"
BUILD = ROOT / "build"
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# vLLM gives handlers to its own loggers alone, so nobody sees messages of other loggers below a warning.
LOGGER = "vllm.kvrouter"


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if not path.is_relative_to(BUILD)]


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a logger's method, with its file and line."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in METHODS and owner in ("log", "_log"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_messages_carry_their_facts_in_the_text() -> None:
    calls = list(log_calls())
    assert len(calls) > 15, "the loggers have other names now: this test sees nothing"
    assert [where for where, call in calls if any(keyword.arg == "extra" for keyword in call.keywords)] == []


def test_every_logger_is_one_that_vllm_shows() -> None:
    names = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                argument = ast.unparse(node.args[0])
                if not (argument.startswith(f"'{LOGGER}") or argument == "LOGGER"):
                    names.append(f"{path.relative_to(ROOT)}: {argument}")
    assert names == []


def test_a_throttled_warning_says_its_facts_and_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    throttled = ThrottledLog(logging.getLogger("t"), lambda: now)
    for seq in range(3):
        throttled.warning("full", "queue full, messages dropped", epoch="e1", seq=seq)
    now = INTERVAL_S
    throttled.warning("full", "queue full, messages dropped", epoch="e1", seq=9)
    assert [record.getMessage() for record in caplog.records] == [
        "kvrouter: queue full, messages dropped (epoch: e1, seq: 0)",
        "kvrouter: queue full, messages dropped (epoch: e1, seq: 9); 2 more of this kind were not logged",
    ]
