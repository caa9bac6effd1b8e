# SPDX-License-Identifier: Apache-2.0
"""A router that was installed without a compiler runs, predicts alike, and reports that it is slow."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
import zmq

from kvrouter.router.base.common.compiled import UNCOMPILED
from tests.support.fake_engine import BLOCK, FakeEngine, prompt, stored
from tests.support.router_process import RouterProcess

TOKENS = prompt(1)
HELD_BLOCKS = 7


@pytest.mark.parametrize("uncompiled", [False, True], ids=["compiled", "uncompiled"])
def test_a_router_without_compiled_modules_says_so_and_predicts_alike(tmp_path: Path, uncompiled: bool) -> None:
    environment = {UNCOMPILED: str(int(uncompiled))}
    with (
        RouterProcess(tmp_path, environment=environment) as router,
        zmq.Context[zmq.Socket[bytes]]() as context,
        closing(FakeEngine(context)) as engine,
    ):
        warnings = router.request("GET", "/health").get("warnings", [])
        assert len(warnings) == uncompiled
        assert not uncompiled or "the modules that decide are not compiled" in warnings[0]
        assert router.metric("kvrouter_build_info", compiled="no" if uncompiled else "yes") == 1
        assert ("are not compiled, so questions" in router.log_tail()) == uncompiled
        router.request("POST", "/register", engine.registration("w0", "m"))
        engine.wait_subscribed()
        router.wait_seen("w0", engine.publish(stored(TOKENS, 0, HELD_BLOCKS)))
        assert router.query("m", "w0", tuple(TOKENS), None)["gpu"] == HELD_BLOCKS * BLOCK
        # A client that also accepts MessagePack is answered without a template.
        for path, body in (
            ("/query", {"model": "m", "token_ids": TOKENS}),
            ("/query_by_hash", {"model": "m", "block_hashes": [2**64 - 1, "0xff"]}),
            ("/query_by_hash", {"model": "m", "block_hashes": list(range(40)), "num_tokens": 700}),
        ):
            short, long = (
                answer(router.port, path, json.dumps(body), accept)
                for accept in ("*/*", "application/msgpack;q=0.1, application/json")
            )
            assert short == long
            assert json.loads(short)["instances"]["w0"]["state"] == "live"


def answer(port: int, path: str, body: str, accept: str) -> bytes:
    with closing(HTTPConnection("127.0.0.1", port)) as client:
        client.request("POST", path, body.encode(), {"Accept": accept})
        return client.getresponse().read()
