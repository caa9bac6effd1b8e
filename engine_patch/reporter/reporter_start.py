# SPDX-License-Identifier: Apache-2.0
"""Starts the reporter beside an engine's own publisher of KV events, at the addresses of its settings."""

from __future__ import annotations

import importlib
import importlib.metadata
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.setup.endpoints import choose
from kvrouter.engine_patch.setup.features import Features
from kvrouter.engine_patch.setup.settings import PatchSettings
from kvrouter.events.patch.messages import DeclaredCatalog, ReportEvent

DISTRIBUTION = "hybrid-kv-engine-patch"
# The version that is reported where only the source tree is there.
NOT_INSTALLED = "not installed"


class Reports(Protocol):
    """The part of a Reporter that the hooks use."""

    def publish(self, make: Callable[[], Iterable[ReportEvent]], batch_seq: int | None) -> None:
        """Queue one message whose events `make` returns; never block and never raise."""
        ...

    def declare(self, catalog: DeclaredCatalog) -> None:
        """Publish the catalog if it differs from the last one."""
        ...

    def withhold(self, scope: Scope, reason: str) -> None:
        """Stop reporting the blocks that the scope covers, for good, and withdraw them from readers."""
        ...

    def close(self) -> None:
        """Send the queued messages and end."""
        ...


def start_reporter(settings: PatchSettings, publisher: Any, features: Features, configured: str) -> Reports | None:
    """Return the listening reporter of one publisher, or None, with one warning, if it cannot listen.

    Args:
        settings: The user's settings.
        publisher: The engine's own publisher.
        features: The patch's features, of which "reports" turns off if the reporter cannot listen.
        configured: The publisher's endpoint in the engine's configuration; if empty, the publisher's own value is used.
    """
    zmq = importlib.import_module("zmq")
    reporting = importlib.import_module("kvrouter.engine_patch.reporter.reporter")
    curve = importlib.import_module("kvrouter.events.transport.curve")
    gates = importlib.import_module("kvrouter.engine_patch.setup.client_gate")
    endpoints = choose(
        configured or publisher._endpoint,
        bound_endpoint(publisher, zmq),
        publisher._dp_rank,
        settings.requests,
        settings.reports,
    )
    if isinstance(endpoints, str):
        features["reports"].off(endpoints)
        return None
    try:
        curve_secret = None if settings.curve_key is None else curve.read_secret(settings.curve_key)
        clients = None if settings.curve_clients is None else gates.ClientList(settings.curve_clients)
        if clients is not None and curve_secret is None:
            raise ValueError("KVROUTER_PATCH_CURVE_CLIENTS needs KVROUTER_PATCH_CURVE_KEY; set it, or neither")
    except ValueError as error:
        features["reports"].off(f"{error}. Nothing is reported without encryption in its place")
        return None
    try:
        reporter: Reports = reporting.Reporter(
            requests=endpoints.requests,
            reports=endpoints.reports,
            settings=settings.reporter(),
            context=zmq.Context.instance(),
            wall_clock=time.time,
            clock=time.monotonic,
            new_epoch=lambda: secrets.token_hex(8),
            dp_rank=publisher._dp_rank,
            patch_version=patch_version(),
            features=features.states,
            curve_secret=curve_secret,
            clients=clients,
        )
    except zmq.ZMQError as error:
        features["reports"].off(
            f"cannot listen on {endpoints.requests}: {error}; set KVROUTER_PATCH_REQUESTS to a free address"
        )
        return None
    return reporter


def patch_version() -> str:
    """Return the version of the installed patch, which is the router's too; or NOT_INSTALLED."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def bound_endpoint(publisher: Any, zmq: Any) -> str:
    """Return the publisher's endpoint with its actual port, because vLLM before 0.31 did not resolve "tcp://*:0"."""
    endpoint = str(publisher._endpoint)
    if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
        host, port = endpoint.rpartition(":")[0], publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{host}:{port}"
    return endpoint
