# SPDX-License-Identifier: Apache-2.0
"""The tests of the proxy and of connection limits once more, over TLS.

The tests of limits run on asyncio's loop, those of the proxy on uvloop.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.contract import (
    test_api_http_limits,
    test_proxy,
    test_proxy_broken_answers,
    test_proxy_clients,
    test_proxy_departures,
    test_proxy_faults,
    test_proxy_short_ways,
)
from tests.contract.test_api_http_limits import patient, small
from tests.support.certificates import Authority, OverTls, Tls

__all__ = ["patient", "small"]

MODULES: tuple[ModuleType, ...] = (
    test_api_http_limits,
    test_proxy,
    test_proxy_broken_answers,
    test_proxy_clients,
    test_proxy_departures,
    test_proxy_faults,
    test_proxy_short_ways,
)
# Tests that need a plain socket, or that TLS itself answers.
PLAIN_ONLY = {
    # Sends on a nonblocking socket, which raises other errors over TLS.
    "test_a_client_that_reads_no_answers_is_not_read_and_then_cut",
    # Sends bytes that are not HTTP, which over TLS are a handshake that fails: see test_tls.py.
    "test_invalid_http_gets_an_error_and_is_counted",
    # Opens one connection too many, which gets no handshake and so no answer: see test_tls.py.
    "test_connections_are_bounded_and_their_places_free_again",
}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    return Tls(authority, authority.issue("server"))


@pytest.fixture(autouse=True)
def over_tls(tls: Tls) -> Iterator[None]:
    OverTls.now = tls
    yield
    OverTls.now = None


for module in MODULES:
    for name, test in list(vars(module).items()):
        if name.startswith("test_") and callable(test) and name not in PLAIN_ONLY:
            globals()[name] = test
