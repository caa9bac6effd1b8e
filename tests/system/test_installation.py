# SPDX-License-Identifier: Apache-2.0
"""The package is built with compiled modules, and without a compiler it is built all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("events", "router", "engine_patch", "simulator", "replay")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
NO_COMPILER = "/bin/false"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, NO_COMPILER], ids=["with a compiler", "without one"])
def test_a_wheel_has_every_source_and_what_could_be_compiled(tmp_path: Path, compiler: str | None) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for folder in FOLDERS:
        # Not what an earlier build left there.
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, clone)
    environment = {**os.environ} if compiler is None else {**os.environ, "CC": compiler}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    done = subprocess.run([*command, str(clone)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    typed = {path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("router/**/*.p[xy][dx]")}
    assert typed and all(f"kvrouter/{name}.py" in names for name in typed)
    page = {path.name for path in (ROOT / "router/page/static").iterdir()}
    assert page and {f"kvrouter/router/page/static/{name}" for name in page} <= names
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == ({f"kvrouter/{name}" for name in typed} if compiler is None else set())
