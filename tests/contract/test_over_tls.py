# SPDX-License-Identifier: Apache-2.0
"""What holds of the proxy and of the limits of connections holds over TLS: the same tests once more, with clients that
speak it. Those of limits run on asyncio's loop, those of the proxy on uvloop."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.contract import (
    test_api_http_limits,
    test_proxy,
    test_proxy_broken_answers,
    test_proxy_clients,
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
    test_proxy_faults,
    test_proxy_short_ways,
)
# What a plain socket alone can do, or what TLS answers itself.
PLAIN_ONLY = {
    # Closes one half.
    "test_a_client_that_reads_no_answers_is_not_read_and_then_cut",
    # Sends no HTTP, which over TLS is a handshake that fails: see test_tls.py.
    "test_invalid_http_gets_an_error_and_is_counted",
    # One too many has no handshake, so it gets no answer: see test_tls.py.
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
