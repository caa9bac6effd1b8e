# SPDX-License-Identifier: Apache-2.0
"""The two distributions, the router's and the engine patch's, built and installed in either order, without an index.

The router's wheel is built without setup.py, because compiling takes minutes and only adds files beside its own modules.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

from tests.support.lent_packages import lend_packages, offline_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ROUTER, PATCH = "hybrid-kv-router", "hybrid-kv-engine-patch"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = (*SETTINGS["tool"]["setuptools"]["package-dir"].values(), "engine_patch")
FILES = ("pyproject.toml", "README.md", "LICENSE")
VERSION = SETTINGS["project"]["version"]
NO_COMPILER = "/bin/false"
# Imports every module of the patch that this environment can import, and prints what became of each, with the modules
# of this project that are loaded then, and the patch's version.
IMPORTS = """
import importlib, json, pkgutil, sys
import kvrouter.engine_patch as patch
imported, missing = [], {}
for module in pkgutil.walk_packages(patch.__path__, "kvrouter.engine_patch."):
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name.partition(".")[0]
from kvrouter.engine_patch.reporter.reporter_start import patch_version
print(json.dumps([imported, missing, [name for name in sys.modules if name.startswith("kvrouter")], patch_version()]))
"""
PLUGINS = """
import json
from importlib.metadata import entry_points
groups = ("vllm.general_plugins", "sglang.srt.plugins")
print(json.dumps([[each.group, each.name, each.value, each.dist.name] for group in groups for each in entry_points(group=group)]))
"""
REGISTERED = [
    ["vllm.general_plugins", "kvrouter", "kvrouter.engine_patch.plugin:register", PATCH],
    ["sglang.srt.plugins", "kvrouter", "kvrouter.engine_patch.sglang.plugin:register", PATCH],
]


def run(command: list[str | Path], cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env or offline_environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def clone(folder: Path) -> Path:
    """Copy the sources as a fresh clone has them, without the script that compiles."""
    folder.mkdir()
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, folder)
    return folder


def built(source: Path, folder: Path) -> Path:
    """Return the wheel of a project's folder or sdist."""
    folder.mkdir()
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    sources = clone(folder / "clone")
    return {ROUTER: built(sources, folder / "router"), PATCH: built(sources / "engine_patch", folder / "patch")}


class Environment:
    """A virtual environment that borrows the packages of this one, except ours."""

    def __init__(self, folder: Path, withheld: tuple[str, ...] = ()) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        (self.site,) = folder.glob("venv/lib/python*/site-packages")
        lend_packages(folder / "lent", self.site, withheld)

    def pip(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        run([sys.executable, "-m", "pip", "--python", self.python, "--quiet", *arguments], self.folder, env)

    def run(self, code: str) -> Any:
        return json.loads(run([self.python, "-c", code], self.folder))

    def files(self, name: str) -> set[str]:
        """Return the files that a distribution recorded, and check that each is there."""
        (record,) = self.site.glob(f"{name.replace('-', '_')}-*.dist-info/RECORD")
        files = {row[0] for row in csv.reader(record.read_text().splitlines())}
        assert not [file for file in files if not (self.site / file).is_file()]
        return files

    def check(self, name: str) -> None:
        """Check that a distribution is whole and works."""
        self.files(name)
        if name == ROUTER:
            shown = run([self.python.with_name("kvrouter"), "--version"], self.folder)
            assert shown.split() == ["kvrouter", VERSION]
        else:
            patch_works(self)


def patch_works(environment: Environment) -> None:
    imported, missing, loaded, version = environment.run(IMPORTS)
    assert version == VERSION
    assert {"kvrouter.engine_patch.plugin", "kvrouter.engine_patch.sglang.plugin"} <= set(imported)
    assert {"kvrouter.engine_patch.reporter.reporter", "kvrouter.engine_patch.events.patch.messages"} <= set(imported)
    # The engine's own packages alone may be missing, and only for the offload tier.
    assert set(missing.values()) <= {"torch", "vllm"}
    assert all(name.startswith("kvrouter.engine_patch.offload.") for name in missing)
    assert {name for name in loaded if not name.startswith("kvrouter.engine_patch")} == {"kvrouter"}


@pytest.mark.parametrize("order", [(ROUTER, PATCH), (PATCH, ROUTER)], ids=["router first", "patch first"])
def test_both_live_in_one_environment_and_either_leaves_the_other_whole(
    wheels: dict[str, Path], tmp_path: Path, order: tuple[str, str]
) -> None:
    first, second = order
    environment = Environment(tmp_path)
    # With the check of requirements, which an index could not answer here.
    environment.pip("install", wheels[first])
    environment.check(first)
    assert environment.run(PLUGINS) == (REGISTERED if first == PATCH else [])
    environment.pip("install", wheels[second])
    environment.check(first)
    environment.check(second)
    assert environment.run(PLUGINS) == REGISTERED
    files = environment.files(first)
    assert not files & environment.files(second)
    assert not [name for name in environment.files(ROUTER) if name.startswith("kvrouter/engine_patch")]
    environment.pip("uninstall", "--yes", first)
    environment.check(second)
    assert environment.run(PLUGINS) == (REGISTERED if second == PATCH else [])
    left = [name for name in files if (environment.site / name).exists()]
    assert not left


def test_neither_requires_the_other(wheels: dict[str, Path]) -> None:
    for name, other in ((ROUTER, PATCH), (PATCH, ROUTER)):
        archive = zipfile.ZipFile(wheels[name])
        (path,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(path).decode())
        assert (metadata["Name"], metadata["Version"]) == (name, VERSION)
        needs = metadata.get_all("Requires-Dist") or []
        assert needs and not [need for need in needs if need.startswith(other)]
        if name == PATCH:
            assert not [need for need in needs if need.startswith("hybrid-kv")]


def test_the_patch_is_installed_from_its_folder_without_cython_and_compiler(tmp_path: Path) -> None:
    sources = clone(tmp_path / "clone")
    environment = Environment(tmp_path, withheld=("cython", "pyximport"))
    assert environment.run("import importlib.util; print(int(importlib.util.find_spec('Cython') is None))")
    # No program is on the path.
    (tmp_path / "empty").mkdir()
    env = offline_environment() | {"PATH": str(tmp_path / "empty"), "CC": NO_COMPILER}
    environment.pip("install", sources / "engine_patch", env=env)
    environment.check(PATCH)
    assert not [name for name in environment.files(PATCH) if name.endswith(".so")]


def test_the_sdist_of_the_patch_makes_the_same_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    sources = clone(tmp_path / "clone")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", code], sources / "engine_patch")
    # Nothing of the clone is in reach of the build.
    shutil.rmtree(sources)
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert contents(built(sdist, tmp_path / "wheel")) == contents(wheels[PATCH])


def contents(wheel: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist()}


def test_a_build_leaves_out_what_an_earlier_one_left(wheels: dict[str, Path], tmp_path: Path) -> None:
    sources = clone(tmp_path / "clone")
    stale = sources / "engine_patch" / "build" / "lib" / "kvrouter" / "engine_patch" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert contents(built(sources / "engine_patch", tmp_path / "wheel")).keys() == contents(wheels[PATCH]).keys()
    assert not (sources / "engine_patch" / "events").exists()
