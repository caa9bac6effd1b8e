# SPDX-License-Identifier: Apache-2.0
"""Kernels are there wherever the router is installed, also where numba finds no folder for its cache."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvrouter.router.common import jit

CALL = """
from doubling import doubled, halved
assert (doubled(21), halved(84)) == (42, 42)
hits = sum(sum(k.stats.cache_hits.values()) for k in (doubled, halved))
print("from cache:", hits)
"""
KERNELS = """
from jit import kernel

@kernel
def doubled(x):
    return 2 * x

@kernel
def halved(x):
    return x // 2
"""
NOWHERE = "/dev/null/nowhere"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of jit.py with two kernels, in a folder where numba cannot write, not even as root."""
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copy(jit.__file__, folder / "jit.py")
    (folder / "doubling.py").write_text(KERNELS)
    (folder / "__pycache__").write_text("a file where a folder should be")
    (tmp_path / "tmp").mkdir()
    return folder


def call(source: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Calls the kernels where neither their folder nor a home can be written."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    places = {"HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE, "TMPDIR": str(source.parent / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", CALL], cwd=source, env=base | places | environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def private_folder(source: Path) -> Path:
    return source.parent / "tmp" / f"kvrouter-numba-{os.getuid()}"


def cached_kernels(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbi"))


@pytest.mark.slow
def test_a_private_temporary_folder_holds_the_cache_where_numba_finds_none(source: Path):
    first, second = call(source), call(source)
    folder = private_folder(source)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(cached_kernels(folder)) == 2
    assert (first.stdout, second.stdout) == ("from cache: 0\n", "from cache: 2\n")
    assert not first.stderr


@pytest.mark.slow
def test_a_cache_folder_that_was_named_is_used(source: Path, tmp_path: Path):
    named = tmp_path / "named"
    assert not call(source, NUMBA_CACHE_DIR=str(named)).stderr
    assert len(cached_kernels(named)) == 2
    assert not private_folder(source).exists()


@pytest.mark.slow
def test_kernels_run_uncached_where_no_folder_can_be_had(source: Path):
    refused = call(source, NUMBA_CACHE_DIR=NOWHERE)
    assert not private_folder(source).exists()
    private_folder(source).symlink_to(source.parent)
    for done in (refused, call(source)):
        assert done.stdout == "from cache: 0\n"
        assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written") == 1
        assert done.stderr.count("\n") == 1
    assert not cached_kernels(source.parent)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"kvrouter-numba-{os.getuid()}"


def test_the_private_folder_is_found_again(temporary: Path):
    assert jit.private_cache_folder() == temporary
    assert jit.private_cache_folder() == temporary


def test_a_folder_that_others_could_write_is_not_trusted(temporary: Path):
    temporary.mkdir()
    for mode in (0o770, 0o702, 0o710):
        temporary.chmod(mode)
        assert jit.private_cache_folder() is None
    temporary.chmod(0o700)
    assert jit.private_cache_folder() == temporary


def test_a_link_or_a_file_in_its_place_is_not_trusted(temporary: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    temporary.symlink_to(tmp_path / "elsewhere")
    assert jit.private_cache_folder() is None
    temporary.unlink()
    temporary.touch(mode=0o600)
    assert jit.private_cache_folder() is None


def test_another_users_folder_is_not_trusted(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stranger = os.getuid() + 1
    (tmp_path / f"kvrouter-numba-{stranger}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    assert jit.private_cache_folder() is None
