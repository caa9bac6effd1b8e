# SPDX-License-Identifier: Apache-2.0
"""A command that only reads settings or shows help ends before it imports the heavy packages of a router."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

HEAVY = ("aiohttp", "fastapi", "grpc", "numpy", "prometheus_client", "redis", "uvicorn")
# Runs the command in a fresh interpreter, then prints its exit code and the packages of HEAVY that it imported.
PROGRAM = f"""
import sys
from kvrouter.router.app.cli.commands import run
code = run(sys.argv[1:])
print(code, *sorted({{name.partition(".")[0] for name in sys.modules}} & {set(HEAVY)!r}))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["serve", "--help"], 0),
        (["epp", "--help"], 0),
        (["workers", "--help"], 0),
        (["drain", "--help"], 0),
        (["explain", "--help"], 0),
        (["demo", "--help"], 0),
        (["config", "--help"], 0),
        (["config", "schema"], 0),
        (["--version"], 0),
        (["serve", "--port", "x"], 2),
        (["serve", "--worker", "w0"], 2),
        (["serve", "--config", "/nowhere.yaml"], 2),
        (["serve", "--redis", "redis://h/0?color=red"], 2),
        (["serve", "--redis", "redis://h:x/0"], 2),
        (["serve", "--redis", "redis+sentinel://h:26379"], 2),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_help_and_refusals_import_nothing_heavy(arguments: Sequence[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(code)


@pytest.mark.parametrize(
    "arguments",
    [["--workers-file", "/nowhere.yaml"], ["--tokenizer", "m=/nowhere"], ["--kubernetes-selector", "app=vllm"]],
    ids=lambda given: given[0],
)
def test_what_a_setting_names_is_looked_for_with_numpy_at_most(arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "serve", *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] in ("2", "2 numpy"), done.stdout
