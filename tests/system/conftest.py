# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run a whole router: its own process, its embedded store, real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support.fake_engine import FakeEngine
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("router")) as process:
        yield process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """Start a Valkey for several routers to share."""
    with StoreServer(tmp_path / "store") as server:
        yield server


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def engines(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[list[FakeEngine]]:
    """Collect the publishers that a test makes, and close them after it."""
    publishers: list[FakeEngine] = []
    yield publishers
    for engine in publishers:
        engine.close()
