# SPDX-License-Identifier: Apache-2.0
"""A process that forks with a reporter, as vLLM may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.report_peer import TIMEOUT_MS

FORKING = """
import os, sys, time, zmq
sys.path.insert(0, sys.argv[1])
from report_peer import said, start, stored
reporter = start(zmq.Context())
child = os.fork()
if not child:
    for number in range(10):
        reporter.publish(said(stored([number])), number)
    reporter.close()
    os._exit(len(reporter._queue))
_, status = os.waitpid(child, 0)
reporter.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_does_nothing() -> None:
    support = Path(__file__).resolve().parents[1] / "support"
    done = subprocess.run([sys.executable, "-c", FORKING, str(support)], timeout=TIMEOUT_MS / 1_000, check=False)
    assert done.returncode == 0
