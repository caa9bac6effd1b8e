# SPDX-License-Identifier: Apache-2.0
"""A gateway that translates requests after the pick: the engine gets another prompt than the picker sees.

The Envoy here sends messages of Anthropic's API to the path of chats, where an engine ignores their `system`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.serve.gateway.picker import translated_paths
from tests.support.envoy_process import EnvoyProcess
from tests.support.exchange import exchange
from tests.support.fleet import settle, until, wait_live
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess

REPLICAS = 2
MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
PREDICTED = "x-kvrouter-predicted-hit"
USER = {"role": "user", "content": "bada bede" * 200}


class Site(NamedTuple):
    router: RouterProcess
    port: int


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = Path(tmp_path_factory.mktemp("translation")), free_port()
    flags = ["--gateway-port", str(port), "--gateway-translated-path", MESSAGES]
    with (
        replicas(REPLICAS, "--shape", "gemma3", "--blocks", "2500", "--instant") as endpoints,
        RouterProcess(folder / "router", [*flags, *worker_flags(endpoints)]) as router,
        EnvoyProcess(
            folder / "envoy",
            [endpoint["url"] for endpoint in endpoints],
            picker_port=port,
            rewrites=(MESSAGES, CHAT),
        ) as envoy,
    ):
        started = Site(router, envoy.port)
        for number in range(REPLICAS):
            hello = {"messages": [{"role": "user", "content": f"hello {number}"}]}
            post(started, CHAT, hello, {"x-kvrouter-worker": f"w{number}"})
        wait_live(router)
        hello = {"messages": [{"role": "user", "content": "hello"}]}
        # The first texts come before the engines' tokens are verified.
        until(lambda: PREDICTED in post(started, CHAT, hello), "the tokens of chats are known")
        yield started


def post(site: Site, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, str]:
    """Return the headers of the answer."""
    answer = exchange(site.port, "POST", path, {"model": MODEL, "max_tokens": 2, **body}, headers)
    assert answer.status == 200, (answer.status, answer.content[:500])
    return answer.headers


def total(router: RouterProcess, name: str, **labels: str) -> float:
    return sum(router.metric(name, model=MODEL, worker=f"w{number}", **labels) for number in range(REPLICAS))


def test_a_translated_request_has_no_prediction(site: Site) -> None:
    router, length = site.router, "kvrouter_token_count_mismatches_total"
    settle(router)
    before = total(router, length)
    for turn in range(10):
        settle(router)
        # The picker takes the system message for a part of the prompt.
        headers = post(site, MESSAGES, {"system": "You are brief.", "messages": [USER]})
        assert PREDICTED not in headers, turn
        decision = router.request("GET", f"/decisions/{headers['x-kvrouter-selection-id']}")
        assert decision["proof"] == "unknown"
    settle(router)
    assert total(router, length) == before
    assert router.request("GET", "/health")["status"] == "ok"


def test_a_request_that_is_not_translated_is_predicted_as_before(site: Site) -> None:
    for _ in range(2):
        settle(site.router)
        headers = post(site, CHAT, {"messages": [USER]})
    decision = site.router.request("GET", f"/decisions/{headers['x-kvrouter-selection-id']}")
    assert int(headers[PREDICTED]) > 0 and decision["proof"] == "exact"


def test_only_paths_that_gateways_translate_are_named() -> None:
    assert translated_paths([MESSAGES, CHAT]) == {MESSAGES, CHAT}
    with pytest.raises(
        SettingError, match="gateway_translated_paths has '/v1/nowhere'; name paths that gateways translate: /v1/chat"
    ):
        translated_paths(["/v1/nowhere"])
