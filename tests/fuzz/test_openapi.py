# SPDX-License-Identifier: Apache-2.0
"""schemathesis on the router's own OpenAPI document, against a running router with simulated replicas behind it.

Positive and negative data, and stateful sequences (register, list, change, drop): no server error, no undeclared
status, and every answer fits its schema, in JSON and MessagePack. `make fuzz` runs it longer, and its coverage phase
too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.fuzz.http_hooks import MODEL
from tests.support.router_process import RouterProcess

# Examples an operation; more where somebody waits for it.
EXAMPLES = int(os.environ.get("KVROUTER_TEST_FUZZ_EXAMPLES", "12"))
PHASES = os.environ.get("KVROUTER_TEST_FUZZ_PHASES", "fuzzing,stateful")
SEED = os.environ.get("KVROUTER_TEST_FUZZ_SEED", "1")
REPLICAS = 3

# Schema-valid bodies that are refused all the same, and rightly: one of two names must be there, two names must not
# contradict each other, a replay endpoint needs an endpoint, an address must be one. msgspec's schemas cannot say such
# things of several fields.
EXCLUDED = "positive_data_acceptance"

HOOKS = Path(__file__).with_name("http_hooks.py")
DEADLINE_S = 900


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    with zmq.Context[zmq.Socket[bytes]]() as context, RouterProcess(tmp_path) as process:
        replicas = [ReplicaServer(make_geometry("gemma3"), 256, context=context, model=MODEL) for _ in range(REPLICAS)]
        thread = ServerThread(replicas)
        thread.start()
        for number, replica in enumerate(replicas):
            ends = replica.endpoints
            body = {"worker_id": f"w{number}", "model": MODEL, "endpoint": ends["events"], "url": ends["url"]}
            process.request("POST", "/register", {**body, "replay_endpoint": ends["replay"]})
        yield process
        thread.stop()


def test_the_api_is_as_its_document_says(router: RouterProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{router.port}/openapi.json"]
    command += ["--checks", "all", "--exclude-checks", EXCLUDED, "--phases", PHASES, "--max-examples", str(EXAMPLES)]
    # What is passed on is answered by an engine.
    command += ["--seed", SEED, "--no-color", "--continue-on-failure", "--exclude-tag", "OpenAI"]
    # A stream has no end.
    command += ["--exclude-path", "/events"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    print(done.stdout[-600:])
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout[-8_000:]}\n{done.stderr[-2_000:]}"
    assert "Traceback" not in router.log_tail()
    # Our own connection was idle for longer than the router keeps one; this opens another.
    router.request("GET", "/health")
    assert router.metric("kvrouter_internal_errors_total") == 0
