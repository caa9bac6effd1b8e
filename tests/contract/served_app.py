# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP port in a thread: uvicorn with the router's own protocol, on a real socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable

import uvicorn

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.http.http_connection import connection_factory
from kvrouter.router.serve.api.http_metrics import CUT_REASONS
from tests.support.certificates import HOST, Tls

WAIT_S = 20.0


def request(path: str, body: bytes, *headers: str, method: str = "POST", close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, *(["connection: close"] if close else []), "", ""]).encode() + body


def connect(port: int, tls: Tls | None = None, timeout_s: float = WAIT_S) -> socket.socket:
    """Connect to a port of this host without Nagle's delay, over TLS if `tls` is given."""
    client = socket.create_connection((HOST, port), timeout=timeout_s)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client if tls is None else tls.authority.client().wrap_socket(client, server_hostname=HOST)


class ServedApp:
    """An app, and its registry, that a thread serves until `close`; over TLS if a context is given."""

    def __init__(
        self,
        built: tuple[HttpApi, MetricRegistry],
        limits: HttpLimits | None = None,
        *,
        context: ssl.SSLContext | None = None,
        loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        graceful_s: int | None = None,
    ) -> None:
        self.app, self._registry = built
        self._socket = socket.create_server((HOST, 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self.app.cold,
            http=connection_factory(self.app, limits, lambda: context),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=graceful_s,
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(loop,))
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def _run(self, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(self.server.serve(sockets=[self._socket]))

    def end(self) -> None:
        """Tell the server to stop, which waits for its connections."""
        self.server.should_exit = True

    def close(self, *, force: bool = False) -> None:
        self.server.force_exit = force
        self.end()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._socket.close()

    def cuts(self) -> dict[str, float]:
        """Return how many connections were cut by reason, without zeros."""
        name = "kvrouter_http_connections_cut_total"
        sample = self._registry.get_sample_value
        return {reason: value for reason in CUT_REASONS if (value := sample(name, {"reason": reason}))}
