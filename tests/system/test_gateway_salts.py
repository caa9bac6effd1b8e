# SPDX-License-Identifier: Apache-2.0
"""Tenants behind a real Envoy whose endpoint picker makes their cache salts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support.envoy_process import BUFFERED, OVERRIDE_HOST, EnvoyProcess
from tests.support.exchange import Answer, exchange
from tests.support.fleet import settle, wait_live
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess

COMPLETIONS = "/v1/completions"
PROMPT = [7] * 600


class Site(NamedTuple):
    router: RouterProcess
    envoys: list[EnvoyProcess]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("gateway"), free_port()
    (folder / "secret").write_text("a-secret-that-is-long-enough-for-HMAC-SHA256")
    salts = ["--cache-salt-secret-file", str(folder / "secret"), "--tenant-header", "x-tenant"]
    with (
        replicas(1, "--shape", "gemma3", "--blocks", "2500") as endpoints,
        RouterProcess(folder / "router", ["--gateway-port", str(port), *salts, *worker_flags(endpoints)]) as router,
    ):
        urls = [endpoint["url"] for endpoint in endpoints]
        with (
            EnvoyProcess(folder / "duplex", urls, picker_port=port) as duplex,
            EnvoyProcess(folder / "held", urls, picker_port=port, how=OVERRIDE_HOST, processing=BUFFERED) as held,
        ):
            started = Site(router, [duplex, held])
            assert send(duplex, "warm", [1] * 100).status == 200
            wait_live(router)
            yield started


def send(
    envoy: EnvoyProcess, tenant: str | None, prompt: list[int], path: str = COMPLETIONS, *, zips: bool = False
) -> Answer:
    headers = {} if tenant is None else {"x-tenant": tenant}
    body: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "cache_salt": "shared"}
    if zips:
        headers |= {"content-encoding": "gzip", "content-type": "application/json"}
        return exchange(envoy.port, "POST", path, gzip.compress(json.dumps(body).encode()), headers)
    return exchange(envoy.port, "POST", path, body, headers)


def reuse(site: Site, envoy: EnvoyProcess, tenant: str, prompt: list[int], *, zips: bool = False) -> int:
    """Return the reused tokens of a prompt, which the picker has predicted."""
    settle(site.router)
    answer = send(envoy, tenant, prompt, zips=zips)
    assert answer.status == 200, answer.content[:300]
    delivered = int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert int(answer.headers["x-kvrouter-predicted-hit"]) == delivered
    return delivered


@pytest.mark.parametrize("way", [0, 1])
def test_tenants_behind_a_gateway_share_no_prompt(site: Site, way: int) -> None:
    envoy, prompt = site.envoys[way], [way + 1, *PROMPT]
    assert reuse(site, envoy, "anna", prompt) == 0
    assert reuse(site, envoy, "bert", prompt) == 0
    assert reuse(site, envoy, "anna", prompt) > 500
    assert reuse(site, envoy, "bert", prompt, zips=True) > 500


def test_a_request_without_a_tenant_or_at_an_unknown_path_is_refused(site: Site) -> None:
    for envoy in site.envoys:
        for tenant, path, expected in (
            (None, COMPLETIONS, (400, "tenant_missing")),
            ("", COMPLETIONS, (400, "tenant_missing")),
            ("anna", "/invocations", (403, "salt_not_allowed")),
        ):
            answer = send(envoy, tenant, PROMPT, path)
            assert (answer.status, answer.json()["error"]["code"]) == expected
