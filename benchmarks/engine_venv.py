# SPDX-License-Identifier: Apache-2.0
"""The environment of the engine patch's benchmarks: the venv of the engine tests, which holds vLLM's CPU build."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ENGINE_TESTS = ROOT / "tests" / "engine"

# vLLM reads these when it is imported: no telemetry, no downloads, event sockets on the loopback interface.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def enter(nixl: bool = False) -> None:
    """Return where vLLM can be imported; else run the script again in the venv of the engine tests, and exit.

    `nixl` adds the library that copies chunks between engines.

    In the venv the helpers of the engine tests can be imported too. The project is installed beside the venv, into a
    folder of its own, so that vLLM finds the patch as it does for a user.
    """
    if importlib.util.find_spec("vllm") is None:
        tests = _engine_tests()
        python = engine_python()
        with tempfile.TemporaryDirectory(prefix="kvr-site-") as site:
            # Remove the output of earlier builds, which would be installed too, with files that no longer exist.
            shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
            tests.pip(python, "install", "--no-deps", "--target", site, *map(str, tests.PROJECTS))
            packages = [site, str(tests.packages_folder(python, "nixl", tests.NIXL))] if nixl else [site]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
            module = f"benchmarks.{Path(sys.argv[0]).stem}"
            command = [str(python), "-m", module, *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    os.environ.update(ENVIRONMENT)


def engine_python() -> Path:
    """Return the interpreter of the venv of the engine tests, which is built if it is missing."""
    python: Path = _engine_tests().engine_python()
    return python


def _engine_tests() -> ModuleType:
    # Load it by its path, because this folder has a `run` module too.
    spec = importlib.util.spec_from_file_location("engine_tests_run", ENGINE_TESTS / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
