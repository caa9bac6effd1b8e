# SPDX-License-Identifier: Apache-2.0
"""Damaged bodies sent to a running router with real residency.

Each one gets a clear error or an answer, and the index does not change.
"""

from __future__ import annotations

import http.client
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.property.test_api_fuzz import bodies
from tests.support.fake_engine import NewEngine, prompt, stored
from tests.support.router_process import RouterProcess

TOKENS = prompt(1)
MODEL = "m"
GOOD: dict[str, dict[str, Any]] = {
    "/query": {"model": MODEL, "token_ids": TOKENS[:40], "cache_salt": "s", "workers": ["w0"], "explain": True},
    "/query_by_hash": {"model": MODEL, "block_hashes": [1, -1, "0xff", 2**64 - 1], "num_tokens": 70, "explain": True},
    "/select": {"model": MODEL, "token_ids": TOKENS[:40], "exclude_workers": ["w9"], "explain": True},
}
EXAMPLES = 400


@pytest.mark.parametrize("path", list(GOOD))
def test_no_body_harms_a_running_router(path: str, router: RouterProcess, new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.join(router, "w0", MODEL, url="http://127.0.0.1:1")
    router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 12)))
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(case=bodies(GOOD[path]))
    def probe(case: tuple[bytes, bool]) -> None:
        body, msgpack = case
        connection.request(
            "POST", path, body, {"content-type": "application/msgpack" if msgpack else "application/json"}
        )
        answer = connection.getresponse()
        raw = answer.read()
        assert answer.status in (200, 400, 404, 503), (answer.status, raw)
        assert answer.status == 200 or b'"error"' in raw or b"error" in raw

    probe()
    connection.close()
    answer = router.request("POST", "/query", {"model": MODEL, "token_ids": TOKENS})
    assert answer["instances"]["w0"]["gpu"] == 192
    assert "Traceback" not in router.log_tail()
    router.unregister("w0")
