# SPDX-License-Identifier: Apache-2.0
"""Builds of the package: with compiled modules, without a compiler, and without Cython.

This Python installs and runs the package, and with `KVROUTER_TEST_EXAMPLES=many` each Python that is on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.examples import many

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = tuple(SETTINGS["tool"]["setuptools"]["package-dir"].values())
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
NO_COMPILER = "/bin/false"
# The module of Cython's own functions, which setup.py names.
SHARED = "kvrouter/router/base/common/cython_shared"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# The modules that this Python compiles with optimization were compiled before, so ccache has them. For the others, neither
# C nor bytecode is compiled beyond what the demo needs, which would take a minute each.
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# Each takes minutes. `make release-check` installs the wheels in every Python of the machine, too.
TRIED = VERSIONS if many() else (HERE,)
# The most that a base installation may take, without pip.
MAX_SITE_MB = 250
# Calls a hook of the build, as pip does, where Cython cannot be imported.
WITHOUT_CYTHON = "import sys; sys.modules['Cython'] = None; from setuptools import build_meta; build_meta.{}({!r})"
EDITABLE = "from setuptools import build_meta; build_meta.build_editable({!r}, {{'editable_mode': 'strict'}})"


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


def modules(names: Iterable[str]) -> set[str]:
    """Return the compiled modules among the names of files, as paths without suffixes."""
    return {name.partition(".")[0] for name in names if name.endswith(".so")}


def typed() -> set[str]:
    """Return the modules that setup.py compiles from this project's sources."""
    sources = [path for wing in ("events", "router") for path in ROOT.glob(f"{wing}/**/*.p[xy][dx]")]
    return {f"kvrouter/{path.relative_to(ROOT).with_suffix('')}" for path in sources}


@pytest.mark.slow
def test_without_a_compiler_a_wheel_has_every_source_and_no_compiled_module(tmp_path: Path) -> None:
    clone = source_tree(tmp_path / "clone")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    done = subprocess.run([*command, str(clone)], env={**os.environ, "CC": NO_COMPILER}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert typed() and all(f"{name}.py" in names for name in typed())
    page = {path.name for path in (ROOT / "router/serve/page/static").iterdir()}
    assert page and {f"kvrouter/router/serve/page/static/{name}" for name in page} <= names
    assert not modules(names)


@pytest.mark.slow
@pytest.mark.parametrize("version", TRIED)
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
    compiler = tmp_path / "compiler"
    optimization, bytecode = ("", "--compile") if version == HERE else ("-O0", "--no-compile")
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" {optimization}\n')
    compiler.chmod(0o755)
    run([inside / "pip", "--disable-pip-version-check", "install", bytecode, sdist], CC=str(compiler))
    (site,) = (tmp_path / "venv/lib").glob("*/site-packages")
    sizes = subprocess.run(["du", "-sm", "--exclude=pip*", site], capture_output=True, text=True)
    assert int(sizes.stdout.split()[0]) < MAX_SITE_MB
    installed = {str(path.relative_to(site)) for path in site.glob("kvrouter/**/*")}
    assert modules(installed) == {*typed(), SHARED} and {f"{name}.py" for name in typed()} <= installed
    # The demo compares every prediction with the tokens that the replicas then reuse, and fails if one is wrong.
    shown = run([inside / "kvrouter", "demo"], cwd=tmp_path)
    assert "not compiled" not in shown
    assert run([inside / "kvrouter", "--version"]).startswith("kvrouter ")


@pytest.mark.smoke
def test_without_compiling_no_cython_is_needed(tmp_path: Path) -> None:
    clone = source_tree(tmp_path / "clone")
    code = WITHOUT_CYTHON.format("build_wheel", str(tmp_path))
    run([sys.executable, "-c", code], cwd=clone, KVROUTER_COMPILE="0")
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvrouter/router/index/matching/judge.py" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.smoke
def test_an_sdist_needs_no_cython(tmp_path: Path) -> None:
    clone = source_tree(tmp_path / "clone")
    run([sys.executable, "-c", WITHOUT_CYTHON.format("build_sdist", str(tmp_path))], cwd=clone)
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1


@pytest.mark.smoke
def test_a_development_install_compiles_only_what_changed(tmp_path: Path) -> None:
    # The folder of the module of Cython's own functions.
    (tmp_path / "router" / "base" / "common").mkdir(parents=True)
    for name in ("changed", "kept"):
        (tmp_path / "router" / f"{name}.py").write_text("def number():\n    return 1\n")
        (tmp_path / "router" / f"{name}.pxd").write_text("cpdef long number()\n")
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'small'\nversion = '1'\n[tool.setuptools]\npackages = ['kvrouter.router']\n"
        "package-dir = {'kvrouter.router' = 'router'}\n"
    )
    shutil.copy(ROOT / "setup.py", tmp_path)
    compiler, log = tmp_path / "compiler", tmp_path / "compiler.log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec gcc "$@"\n')
    compiler.chmod(0o755)

    def install(program: str | Path) -> tuple[str, set[str]]:
        """Return the compiler's arguments, and the names of the modules that are linked compiled."""
        log.write_text("")
        run([sys.executable, "-c", EDITABLE.format(str(tmp_path / "dist"))], cwd=tmp_path, CC=str(program))
        linked = (tmp_path / "build").glob("__editable__*/kvrouter/router/*.so")
        return log.read_text(), {path.name.partition(".")[0] for path in linked}

    (tmp_path / "dist").mkdir()
    first, linked = install(compiler)
    assert "changed.c" in first and "kept.c" in first and linked == {"changed", "kept"}
    assert install(compiler) == ("", {"changed", "kept"})
    source = tmp_path / "router" / "changed.py"
    source.write_text("def number():\n    return 2\n")
    second, linked = install(compiler)
    assert "changed.c" in second and "kept.c" not in second and linked == {"changed", "kept"}
    # A module that cannot be compiled runs from its source; the earlier result is not used.
    source.write_text("def number():\n    return 3\n")
    assert install(NO_COMPILER) == ("", {"kept"})


@pytest.mark.smoke
def test_make_demo_compiles_nothing_and_uses_what_is_installed(tmp_path: Path) -> None:
    demo = ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path}", "demo"]
    fresh = run(demo, cwd=ROOT)
    assert "KVROUTER_COMPILE=0" in fresh and "Cython" not in fresh
    (tmp_path / "installed").touch()
    assert run(demo, cwd=ROOT).split()[-1:] == ["demo"] and "pip" not in run(demo, cwd=ROOT)
    (tmp_path / "installed").unlink()
    compiling = run([*demo[:-1], f"{tmp_path}/installed"], cwd=ROOT)
    assert "KVROUTER_COMPILE" not in compiling
    assert all(f"'{tool}'" in compiling for tool in SETTINGS["build-system"]["requires"])
    # The modules that stay in the folder of builds are not compiled again.
    assert not [line for line in (fresh + compiling).splitlines() if "rm " in line and " build " in f"{line} "]


def run(command: Sequence[str | Path], cwd: Path | None = None, **variables: str) -> str:
    # Hide this environment's Python and settings from the new one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVROUTER_"))}
    environment |= variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
