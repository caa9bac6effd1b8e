# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run a whole router: its own process, its embedded store, real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from playwright.sync_api import Browser

from tests.support.browser_page import BrowserPage, browser
from tests.support.churn import Churn
from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import FakeEngine, NewEngine
from tests.support.fleet import two_empty_routers
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RouterProcess]:
    """Start a router with the flags that the module states as ROUTER_FLAGS, if it does."""
    flags = getattr(request.module, "ROUTER_FLAGS", ())
    with RouterProcess(tmp_path_factory.mktemp("router"), flags) as process:
        yield process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """Start a Valkey for several routers to share."""
    with StoreServer(tmp_path / "store") as server:
        yield server


@pytest.fixture
def pair(tmp_path: Path, server: StoreServer) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """Start two routers that share the server."""
    with two_empty_routers(tmp_path, server.url) as pair:
        yield pair


@pytest.fixture
def churn(request: pytest.FixtureRequest) -> Iterator[Churn]:
    """Start the engines that the module counts as ENGINES, which publish RATE blocks a second."""
    with Churn(request.module.ENGINES, request.module.RATE) as churn:
        yield churn


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


@pytest.fixture
def new_engine(context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine]) -> NewEngine:
    """Make publishers that are closed after the test."""

    def make(**options: Any) -> FakeEngine:
        engines.append(FakeEngine(context, **options))
        return engines[-1]

    return make


@pytest.fixture
def engine(new_engine: NewEngine) -> FakeEngine:
    return new_engine()


@pytest.fixture
def http() -> Iterator[EngineHttp]:
    """Start the HTTP side of an engine."""
    server = EngineHttp()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Start the browser for the tests of a module."""
    with browser() as started:
        yield started


@pytest.fixture
def tab(chromium: Browser, router: RouterProcess) -> Iterator[BrowserPage]:
    """Open a tab of the browser for the page of the module's router."""
    tab = BrowserPage(chromium, router.port)
    yield tab
    tab.close()
