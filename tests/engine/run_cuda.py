# SPDX-License-Identifier: Apache-2.0
"""Run the engine tests of patch, offload tiers and router on a machine with a CUDA device, in the environment there.

Nothing is installed: PYTHON must name an interpreter that has torch and vLLM for CUDA, this project and its engine
patch, pytest and hypothesis. Elsewhere nothing runs, and one line says why.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The copies alone come first: they take seconds, and all others rest on them.
TESTS = (
    *("test_offload_region.py", "test_offload_copier.py", "test_device_transfers.py", "test_cuda_copier.py"),
    *("test_offload_engine.py", "test_offload_lives.py", "test_patch_engine.py", "test_real_engine.py"),
)
NEEDED = ("torch", "vllm", "kvrouter", "pytest", "hypothesis")
# A machine for this has no network beside loopback, and nobody to answer questions about usage.
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}


def obstacle() -> str:
    """Return why the tests cannot run here, empty if they can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"this Python lacks {', '.join(missing)}: name one that has them, as in `make test-cuda PYTHON=...`"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device here, or torch is its CPU build"
    return ""


def main() -> int:
    """Run the tests, and return pytest's exit status; 0 where they cannot run."""
    if reason := obstacle():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    tests = [f"tests/engine/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
