# SPDX-License-Identifier: Apache-2.0
"""`kvrouter sim` as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.json_http import call, refusal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_where_it_listens_and_ends_cleanly(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvrouter.simulator", "--shape", "gemma3", "--window", "64", "--blocks", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        assert addresses["model"] == "sim-gemma3"
        body = {"prompt": list(range(200)), "max_tokens": 2}
        call(f"{addresses['url']}/v1/completions", body)
        usage = call(f"{addresses['url']}/v1/completions", body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 192
        process.send_signal(number)
        rest = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, ("", ""))


def test_many_replicas_in_one_process_with_faults_from_the_start() -> None:
    command = [sys.executable, "-m", "kvrouter.simulator", "--shape", "llama", "--replicas", "3", "--instant"]
    with subprocess.Popen(
        [*command, "--fail", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        replicas = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert len({addresses["url"] for addresses in replicas} | {addresses["events"] for addresses in replicas}) == 6
        for addresses in replicas:
            refusal(f"{addresses['url']}/v1/completions", {"prompt": [1]})
            assert call(f"{addresses['url']}/v1/completions", {"prompt": [1]})["model"] == "sim-llama"
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, ("", ""))


def test_a_port_that_is_taken_is_named_with_the_range_before_any_replica_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvrouter.simulator", "--port", str(port)]
        alone = subprocess.run(command, capture_output=True, text=True)
        several = subprocess.run([*command, "--replicas", "3"], capture_output=True, text=True)
    assert (alone.returncode, alone.stdout, several.returncode, several.stdout) == (2, "", 2, "")
    begin = (
        f"kvrouter sim: cannot listen on 127.0.0.1 port {port} (Address already in use); stop what listens there, or pass "
        "another --host or --port; "
    )
    assert alone.stderr == f"{begin}--port 0 takes free ones\n"
    assert several.stderr == f"{begin}ports {port} to {port + 2} are needed; --port 0 takes free ones\n"


def test_ports_beyond_the_highest_are_refused() -> None:
    command = [sys.executable, "-m", "kvrouter.simulator", "--port", "65535", "--replicas", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "ports 65535 to 65536 are needed; the highest port is 65535" in done.stderr
