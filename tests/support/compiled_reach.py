# SPDX-License-Identifier: Apache-2.0
"""The test files that can run a compiled module. The others run the same code, whether modules are compiled or not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The tests of these folders start no process, so they can run only what their file imports.
IN_PROCESS = ("unit", "property")
# These files repeat the tests of other files over TLS, so compiled modules get the same bytes in both.
REPEATED = ("test_over_tls.py",)
# Parsing all files with `ast` would take each process of pytest-xdist four seconds.
IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (\([^)]*\)|.*)", re.MULTILINE)


def reaches_compiled(test_file: Path) -> bool:
    """Return whether a test of the file may run a compiled module that the file imports, directly or not."""
    if test_file.name in REPEATED:
        return False
    if test_file.parent.name not in IN_PROCESS:
        return True
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
