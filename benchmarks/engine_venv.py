# SPDX-License-Identifier: Apache-2.0
"""For benchmarks of the engine patch: they run in the venv of the engine tests, which holds vLLM's CPU build."""

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


def enter() -> None:
    """Goes on where vLLM can be imported, with the helpers of the engine tests; else runs the script again there and
    exits.

    The project is installed beside the venv, into a folder of its own, so that vLLM finds the patch as it does for a
    user.
    """
    if importlib.util.find_spec("vllm") is None:
        tests = _engine_tests()
        python = tests.engine_python()
        with tempfile.TemporaryDirectory(prefix="kvr-site-") as site:
            # What an earlier build left there would be installed too, also files that are gone by now.
            shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
            tests.pip(python, "install", "--no-deps", "--target", site, str(ROOT))
            environment = {**os.environ, "PYTHONPATH": site}
            module = f"benchmarks.{Path(sys.argv[0]).stem}"
            command = [python, "-m", module, *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    os.environ.update(ENVIRONMENT)


def _engine_tests() -> ModuleType:
    # By its path: this folder has a `run` of its own.
    spec = importlib.util.spec_from_file_location("engine_tests_run", ENGINE_TESTS / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
