# SPDX-License-Identifier: Apache-2.0
"""`make bench-peers` without its peers: it measures our own code, and names each peer that is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.peers.table import Group

ROOT = Path(__file__).resolve().parents[2]


def test_a_peer_that_cannot_be_installed_is_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    results = tmp_path / "found.json"
    environment = os.environ | {
        "KVROUTER_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    environment.pop("PIP_FIND_LINKS", None)
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--only", "ingest", "--json", str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = msgspec.json.decode(results.read_bytes(), type=dict[str, Group])["ingest"].rows
    assert len(rows) == 8
    assert all(row.ours and not row.theirs and "ai-dynamo-runtime" in row.problem for row in rows)
    assert done.stdout.count("not measured: ai-dynamo-runtime 1.6.1 cannot be installed") == len(rows)
    # The cache stays empty, so the next run takes nothing half-built for a peer.
    assert not list((tmp_path / "cache").iterdir())
