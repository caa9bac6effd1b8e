# SPDX-License-Identifier: Apache-2.0
"""The test files that `make test-uncompiled` runs: those of which a wrong uncompiled module can fail a test.

A file that can run no compiled module runs the same code, whether modules are compiled or not. Two kinds of files are left
out although they could. Most tests of whole routers, HTTP, keys and commands meet these modules only as readers of plain
heads and hashes, which the files of `CONTRACTS` compare byte by byte. And the files of `REPEATED` send through them what
others do, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The tests of these folders can run only what their file imports: they start no process but stores, and worlds of the
# simulation.
IN_PROCESS = ("unit", "property", "simulation")
# Contracts whose subject compiled modules decide: questions and hits, heads of requests and answers, numbers in JSON,
# events and copies that a store keeps, and a whole router without any compiled module.
CONTRACTS = (
    *("test_api_asking.py", "test_api_http_heads.py", "test_api_http_requests.py", "test_api_pulls.py"),
    *("test_checkpoints.py", "test_client.py", "test_index_contract.py", "test_kv_sources.py"),
    *("test_proxy.py", "test_proxy_broken_answers.py", "test_proxy_short_ways.py", "test_python_json.py"),
    *("test_third_router.py", "test_uncompiled.py"),
)
# Thousands of prompts through simulated fleets, which take minutes uncompiled. `test_hit_rule.py`, `test_chain_hash.py`,
# `test_tables.py` and the simulation have prompts of all these forms.
REPEATED = ("test_choice_of_traffic.py", "test_prompts_ahead.py", "test_replay_command.py", "test_replay_runs.py")
# Parsing all files with `ast` would take each process of pytest-xdist four seconds.
IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (\([^)]*\)|.*)", re.MULTILINE)


def reaches_compiled(test_file: Path) -> bool:
    """Return whether a wrong uncompiled module could fail a test of the file, and no other file's test."""
    if test_file.name in REPEATED:
        return False
    if test_file.parent.name not in IN_PROCESS:
        return test_file.name in CONTRACTS
    seen: set[Path] = set()
    unread = [test_file]
    while unread:
        path = unread.pop()
        if path not in seen:
            seen.add(path)
            unread.extend(imported_files(path))
    return any(is_compiled(path) for path in seen)


@functools.cache
def is_compiled(path: Path) -> bool:
    return any(path.with_suffix(suffix).exists() for suffix in (".pxd", ".pyx"))


@functools.cache
def imported_files(path: Path) -> frozenset[Path]:
    """Return the files of this project that a file imports, also inside functions."""
    return frozenset(file for name in _names(path.read_text()) if (file := _file_of(name)) is not None)


def _names(text: str) -> Iterator[str]:
    for module, names in IMPORT.findall(text):
        if module:
            yield module
        for name in re.findall(r"[\w.]+", names):
            yield f"{module}.{name}" if module else name


@functools.cache
def _file_of(name: str) -> Path | None:
    """Return the file of a module of this project, or None for anything else."""
    package, _, rest = name.partition(".")
    if package not in ("kvrouter", "tests", "benchmarks") or not rest:
        return None
    base = ROOT.joinpath(*(name if package != "kvrouter" else rest).split("."))
    files = (base.with_suffix(".py"), base / "__init__.py", base.with_suffix(".pyx"))
    return next((file for file in files if file.exists()), None)
