# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server of which only the address is known: the router finds its model and its event endpoints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

WAIT_S = 60.0


def test_an_address_is_enough(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    with ChatServer(tmp_path, model) as engine:
        workers = tmp_path / "workers.yaml"
        workers.write_text(f"- {{worker_id: w0, url: {engine.url}}}\n")
        with RouterProcess(tmp_path / "router", ["--workers-file", str(workers)]) as router:
            deadline = time.monotonic() + WAIT_S
            while not (rows := router.request("GET", "/workers")["workers"]):
                assert time.monotonic() < deadline, router.log_tail()
                time.sleep(0.1)
            (row,) = rows
            assert (row["worker_id"], row["dp_rank"], row["model"], row["source"]) == ("w0", 0, engine.name, "file")
            assert not row["approximate"], "its events are not followed"
            router.wait_connected("w0")
            prompt = list(range(10, 400))
            body = {"model": engine.name, "prompt": prompt, "max_tokens": 2}
            assert router.request("POST", "/v1/completions", body)["usage"]["prompt_tokens"] == len(prompt)
            while not (hit := router.query(engine.name, "w0", tuple(prompt), None)["gpu"]):
                assert time.monotonic() < deadline, router.worker("w0")
                time.sleep(0.1)
            reused = router.request("POST", "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert hit == reused > 0
            print(f"\nfrom the address alone: predicted {hit}, reused {reused} of {len(prompt)} tokens")
