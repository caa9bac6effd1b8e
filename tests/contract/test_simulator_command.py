# SPDX-License-Identifier: Apache-2.0
"""`kvrouter sim` as a process."""

from __future__ import annotations

import json
import signal
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
