# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of an engine, as probes of its health and metrics see it.

It is a real server that can hang, fail, stop and start again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.quiet_server import QuietServer


class EngineHttp:
    """A server that listens until `stop`; `start` lets it listen on the same port again."""

    def __init__(self, start_s: float | None = 1_000.5) -> None:
        # Start time of the engine's process in /metrics; None if they do not have it.
        self.start_s = start_s
        self.status = 200
        # Running and waiting requests in /metrics.
        self.running = self.waiting = 0
        # Further lines of /metrics.
        self.metrics = b""
        # Seconds before each answer.
        self.delay_s = 0.0
        # Seconds by which the clock of its `Date` header is ahead.
        self.ahead_s = 0.0
        # Bodies of other paths, empty by default.
        self.pages: dict[str, bytes] = {}
        # Paths that are answered with 404.
        self.missing: set[str] = set()
        # Paths of the requests so far.
        self.asked: list[str] = []
        self._connections: list[socket.socket] = []
        self._server: QuietServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine.asked.append(self.path)
                time.sleep(engine.delay_s)
                body = engine.pages.get(self.path, b"")
                if self.path == "/metrics":
                    body = b"# HELP process_start_time_seconds Start time\n# TYPE process_start_time_seconds gauge\n"
                    if engine.start_s is not None:
                        body += f"process_start_time_seconds {engine.start_s}\n".encode()
                    body += f"vllm:num_requests_running {float(engine.running)}\n".encode()
                    body += f"vllm:num_requests_waiting {float(engine.waiting)}\n".encode() + engine.metrics
                self.send_response(404 if self.path in engine.missing else engine.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(time.time() + engine.ahead_s)

            def setup(self) -> None:
                super().setup()
                engine._connections.append(self.connection)

            def log_message(self, *_: Any) -> None: ...

        server = self._server = QuietServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections and cut the open ones, like a process that has ended."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._connections.clear()
