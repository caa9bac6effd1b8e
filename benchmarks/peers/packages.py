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
# The names of the folders, by which the tests look for dynamo's.
FOLDERS = {"ai-dynamo-runtime": "dynamo", "vllm-router": "vllm-router"}
# By default pip tries a registry that does not answer for minutes.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")
REASON_CHARACTERS_MAX = 200


class Package(msgspec.Struct):
    """A package of a peer."""

    # The folder with its commands; None if it is not installed, with the reason in `problem`.
    bin: Path | None
    problem: str = ""

    def command(self, name: str) -> list[str]:
        """Return the command line of one of its scripts, or an empty list if the package is not installed.

        The script is run by its venv's python, because its first line still has the path from before the rename.
        """
        return [] if self.bin is None else [str(self.bin / "python"), str(self.bin / name)]


class PeerSettings(Settings):
    """The flags of a run, and the packages of the peers."""

    dynamo: Package
    vllm_router: Package


def environment(name: str) -> Package:
    """Return the package in its environment, which is built if it is missing."""
    folder = CACHE / f"{FOLDERS[name]}-{VERSIONS[name]}-{platform.python_version()}"
    if (folder / "bin" / "python").exists():
        return Package(folder / "bin")
    progress(f"building {folder}")
    # Build under another name, so that an interrupted build is never taken for a complete one; venvs work after a
    # rename as long as their scripts are run by their python.
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


def reason(output: str) -> str:
    """Return the last error that pip printed, in a form that fits a cell of a table."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ").replace("|", "/")[:REASON_CHARACTERS_MAX]
