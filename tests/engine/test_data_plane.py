# SPDX-License-Identifier: Apache-2.0
"""NIXL in an engine that exchanges nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu12")

pytestmark = pytest.mark.engine

# Ends as soon as every thread but the main one sleeps; a thread that polls without a pause is always running.
SCRIPT = """
import os, time
from pathlib import Path

import numpy as np

from kvrouter.engine_patch.offload.peer.data_plane import NixlPlane

memory = np.ones(1 << 20, np.uint8)
plane = NixlPlane("idle", int(memory.ctypes.data), memory.nbytes)
others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
assert others
while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "S" for task in others):
    time.sleep(0.01)
os._exit(0)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the states of threads are in Linux's /proc")
def test_no_thread_of_nixl_keeps_a_core_busy_while_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
