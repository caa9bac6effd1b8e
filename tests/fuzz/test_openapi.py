# SPDX-License-Identifier: Apache-2.0
"""Tests of a running router with schemathesis, from its own OpenAPI document, with simulated replicas as workers.

They send valid and invalid data, and stateful sequences (register, list, change, drop). No answer may be a server error
or have an undeclared status, and every answer fits its schema, in JSON and MessagePack. `make fuzz` runs them longer,
with the coverage phase too.
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

# Examples for each operation; `make fuzz` sets more.
EXAMPLES = int(os.environ.get("KVROUTER_TEST_FUZZ_EXAMPLES", "12"))
PHASES = os.environ.get("KVROUTER_TEST_FUZZ_PHASES", "fuzzing,stateful")
SEED = os.environ.get("KVROUTER_TEST_FUZZ_SEED", "1")
REPLICAS = 3

# The router rightly refuses some bodies that are valid by the schema: one of two names must be present, two names must
# not contradict each other, a replay endpoint needs an endpoint, and an address must be one. msgspec's schemas cannot
# express such rules about several fields.
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
            endpoints = replica.endpoints
            body = {"worker_id": f"w{number}", "model": MODEL, "endpoint": endpoints["events"], "url": endpoints["url"]}
            process.request("POST", "/register", {**body, "replay_endpoint": endpoints["replay"]})
        yield process
        thread.stop()


def test_the_api_is_as_its_document_says(router: RouterProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{router.port}/openapi.json"]
    command += ["--checks", "all", "--exclude-checks", EXCLUDED, "--phases", PHASES, "--max-examples", str(EXAMPLES)]
    # The OpenAI routes are excluded, because an engine answers them.
    command += ["--seed", SEED, "--no-color", "--continue-on-failure", "--exclude-tag", "OpenAI"]
    # The stream of events has no end.
    command += ["--exclude-path", "/events"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    print(process.stdout[-600:])
    assert process.returncode == 0, f"seed {SEED}\n{process.stdout[-8_000:]}\n{process.stderr[-2_000:]}"
    assert "Traceback" not in router.log_tail()
    # The test's own connection was idle for so long that the router has closed it; this request opens another one.
    router.request("GET", "/health")
    assert router.metric("kvrouter_internal_errors_total") == 0
