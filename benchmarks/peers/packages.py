# SPDX-License-Identifier: Apache-2.0
"""The peers' packages, each in an environment of its own outside the clone, built on first use."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.report import CACHE, Settings, progress

VERSIONS = {"ai-dynamo-runtime": "1.6.1", "vllm-router": "0.1.17"}
# Folders have the name by which the tests look for dynamo's.
FOLDERS = {"ai-dynamo-runtime": "dynamo", "vllm-router": "vllm-router"}
# By default pip tries a registry that is not there for minutes.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")
REASON_CHARACTERS_MAX = 200


class Package(msgspec.Struct):
    """bin: the folder with its commands; None with the reason in `problem`."""

    bin: Path | None
    problem: str = ""

    def command(self, name: str) -> list[str]:
        """One of its scripts, run by its python: their first lines have the path from before the rename. Empty if the
        package is not there."""
        return [] if self.bin is None else [str(self.bin / "python"), str(self.bin / name)]


class PeerSettings(Settings):
    """The flags, and what there is of the peers."""

    dynamo: Package
    vllm_router: Package


def environment(name: str) -> Package:
    """The environment of a package, which is built if it is missing."""
    folder = CACHE / f"{FOLDERS[name]}-{VERSIONS[name]}-{platform.python_version()}"
    if (folder / "bin" / "python").exists():
        return Package(folder / "bin")
    progress(f"building {folder}")
    # Built under another name, so that an interrupted build is never taken for a whole one; venvs work after a rename
    # as long as they are called by their python.
    building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "venv", str(building))
        run(str(building / "bin" / "python"), *PIP, f"{name}=={VERSIONS[name]}")
        building.rename(folder)
    except OSError as error:
        return Package(None, f"{folder} cannot be made: {error}")
    except subprocess.CalledProcessError as error:
        return Package(None, f"{name} {VERSIONS[name]} cannot be installed: {reason(error.stderr)}")
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Package(folder / "bin")


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def reason(said: str) -> str:
    """The last error that pip printed, as a table's cell can have it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ").replace("|", "/")[:REASON_CHARACTERS_MAX]
