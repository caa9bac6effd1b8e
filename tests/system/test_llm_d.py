# SPDX-License-Identifier: Apache-2.0
"""The adapter for llm-d's scheduler, in Go, before a real router: its hits are the tokens that replicas then reuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.exchange import post
from tests.support.replica_process import MODEL, ReplicaProcess
from tests.support.router_process import RouterProcess

ADAPTER = Path(__file__).resolve().parents[2] / "deploy" / "llm-d"
WAIT_S = 60.0
KEY = "secret"


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go toolchain: apt-get install golang-go")
def test_the_hits_that_llm_ds_scheduler_gets_are_what_replicas_reuse(tmp_path: Path) -> None:
    prompt = list(range(600))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    # The pool holds a prompt or two, so that a part of this one is in the CPU tier alone.
    sizes = ["--shape", "gemma3", "--model", MODEL, "--instant", "--cpu-chunks", "4000"]
    with ReplicaProcess(tmp_path / "0", sizes) as cold, ReplicaProcess(tmp_path / "1", sizes) as warm:
        workers = ["--worker", cold.spec("pod-0"), "--worker", warm.spec("pod-1")]
        with RouterProcess(tmp_path / "router", [*workers, "--api-key", KEY]) as router:
            post(warm.endpoints["url"], "/v1/completions", body)
            headers = {"authorization": f"Bearer {KEY}"}
            deadline = time.monotonic() + WAIT_S
            while True:
                question = {"model": MODEL, "token_ids": prompt}
                answer = router.request("POST", "/query", question, headers)["instances"]
                if answer["pod-1"]["longest_matched"] and {row["state"] for row in answer.values()} == {"live"}:
                    break
                assert time.monotonic() < deadline, answer
                time.sleep(0.05)
            usage = post(warm.endpoints["url"], "/v1/completions", body)["usage"]
            fleet: dict[str, Any] = {
                "url": f"http://127.0.0.1:{router.port}",
                "api_key": KEY,
                "model": MODEL,
                "tokens": prompt,
                "reused": {"pod-0": 0, "pod-1": usage["prompt_tokens_details"]["cached_tokens"]},
            }
            assert fleet["reused"]["pod-1"] > 0
            done = go(tmp_path, "test", "-count=1", "-v", "./...", KVROUTER_LLM_D_FLEET=json.dumps(fleet))
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.count("--- PASS") == 3
            # The adapter's test notices another number of tokens.
            fleet["reused"]["pod-1"] += 1
            wrong = go(tmp_path, "test", "-count=1", "./...", KVROUTER_LLM_D_FLEET=json.dumps(fleet))
            assert wrong.returncode != 0 and "were reused" in wrong.stdout
    assert go(tmp_path, "vet", "./...").returncode == 0


def test_the_configuration_names_the_producer_and_the_scorer_that_reads_it() -> None:
    config = yaml.safe_load((ADAPTER / "epp-config.yaml").read_text())
    types = [plugin["type"] for plugin in config["plugins"]]
    (kind,) = (
        line.split('"')[1]
        for line in (ADAPTER / "producer/producer.go").read_text().splitlines()
        if "\tType = " in line
    )
    assert types.index("token-producer") < types.index(kind)
    (scorer,) = (plugin for plugin in config["plugins"] if plugin["type"] == "prefix-cache-scorer")
    assert scorer["parameters"] == {"prefixMatchInfoProducerName": kind}
    used = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    assert "prefix-cache-scorer" in used and used <= set(types)


def go(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"GOCACHE": str(folder / "go"), "GOPROXY": "off", "GOFLAGS": "-mod=mod", "CGO_ENABLED": "0"}
    return subprocess.run(
        ["go", *words], cwd=ADAPTER / "query", env={**os.environ, **own, **environment}, capture_output=True, text=True
    )
