# SPDX-License-Identifier: Apache-2.0
"""Builds of the package, with compiled modules and without a compiler.

Each Python that is on this machine installs and runs the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = tuple(SETTINGS["tool"]["setuptools"]["package-dir"].values())
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
NO_COMPILER = "/bin/false"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# The most that a base installation may take, without pip.
MAX_SITE_MB = 250


def source_tree(folder: Path) -> Path:
    """Copy the package's files as a fresh clone has them, and return their folder."""
    folder.mkdir()
    for name in FOLDERS:
        # Leave out the files that an earlier build left there.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, folder)
    return folder


def interpreter(version: str) -> Path | None:
    """Return this version's Python from the PATH or from pyenv, or None if there is none that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    on_path = shutil.which(f"python{version}")
    places = [*([Path(on_path)] if on_path else []), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for place in places:
        code = "import sys, venv, ensurepip; print('.'.join(map(str, sys.version_info[:2])))"
        probe = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        if probe.stdout.strip() == version:
            return place
    return None


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, NO_COMPILER], ids=["with a compiler", "without one"])
def test_a_wheel_has_every_source_and_what_could_be_compiled(tmp_path: Path, compiler: str | None) -> None:
    clone = source_tree(tmp_path / "clone")
    environment = {**os.environ} if compiler is None else {**os.environ, "CC": compiler}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    done = subprocess.run([*command, str(clone)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    typed = {path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("router/**/*.p[xy][dx]")}
    assert typed and all(f"kvrouter/{name}.py" in names for name in typed)
    page = {path.name for path in (ROOT / "router/serve/page/static").iterdir()}
    assert page and {f"kvrouter/router/serve/page/static/{name}" for name in page} <= names
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == ({f"kvrouter/{name}" for name in typed} if compiler is None else set())


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_wheel_made_of_the_sdist_installs_and_predicts(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    clone = source_tree(tmp_path / "clone")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", code], cwd=clone)
    (sdist,) = tmp_path.glob("*.tar.gz")
    run([python, "-m", "venv", tmp_path / "venv"])
    inside = tmp_path / "venv" / "bin"
    run([inside / "pip", "--disable-pip-version-check", "install", sdist])
    sizes = subprocess.run(
        ["du", "-sm", "--exclude=pip*", *(tmp_path / "venv/lib").glob("*/site-packages")],
        capture_output=True,
        text=True,
    )
    assert int(sizes.stdout.split()[0]) < MAX_SITE_MB
    # The demo compares every prediction with the tokens that the replicas then reuse, and fails if one is wrong.
    shown = run([inside / "kvrouter", "demo"], cwd=tmp_path)
    assert "not compiled" not in shown
    assert run([inside / "kvrouter", "--version"]).startswith("kvrouter ")


def run(command: list[str | Path], cwd: Path | None = None) -> str:
    # Hide this environment's Python and settings from the new one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVROUTER_"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
