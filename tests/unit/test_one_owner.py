# SPDX-License-Identifier: Apache-2.0
"""Only the state of a worker changes what it owns: all others report to it what happened."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWNERS = {ROOT / "router/follow/streams" / name for name in ("shown_worker.py", "worker_state.py")}
# Parts of a worker's state, and the names by which other objects hold it. What comes after one of these names in an
# assignment is owned.
OWNED = {"state", "_state", "facts", "ingest", "lead", "shown", "peer", "profile"}
# An object may hold its own part under one of these names.
OWN = "self"


def owned_targets(source: str) -> Iterator[str]:
    """Yield each assignment of an attribute of a worker's state, and each deletion of one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
            continue
        names: list[str] = []
        base: ast.expr = node.value
        while isinstance(base, ast.Attribute | ast.Subscript | ast.Call):
            if isinstance(base, ast.Attribute):
                names.append(base.attr)
            base = base.func if isinstance(base, ast.Call) else base.value
        if isinstance(base, ast.Name) and base.id != OWN:
            names.append(base.id)
        if OWNED & set(names):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def readers() -> list[Path]:
    """Return the modules that have a worker's state without owning it."""
    paths = [*ROOT.glob("router/follow/**/*.py"), *ROOT.glob("router/app/**/*.py")]
    return [path for path in paths if path not in OWNERS]


def test_no_other_module_assigns_an_attribute_of_a_workers_state() -> None:
    wrong = [f"{path.relative_to(ROOT)}, {target}" for path in readers() for target in owned_targets(path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_no_other_module_publishes_or_shows() -> None:
    for path in readers():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("_publish", "_show"):
                assert isinstance(node.value, ast.Name) and node.value.id == OWN, f"{path}, line {node.lineno}"


@pytest.mark.parametrize(
    "source",
    [
        "follower.state.view = view",
        "self._state.facts.hold_problem = None",
        "self._state.facts.cache, problem = cache, ''",
        "facts.overdue = True",
        "ingest = self._state.ingest\ningest.reports.wants_snapshot = None",
        "followers[worker].state.shown.seq += 1",
        "self.state.ingest.profile.patch.withheld = ''",
        "del state.lead",
        "with opened() as self.state.lead:\n    pass",
    ],
)
def test_the_check_finds_such_an_assignment(source: str) -> None:
    assert list(owned_targets(source))


def test_the_check_lets_an_object_name_the_state_that_it_reports_to() -> None:
    assert not list(owned_targets("self._state = state\nself.state = self.facts\nstate, view = follower.state, 1"))
