# SPDX-License-Identifier: Apache-2.0
"""Claim: a request costs less CPU time on our own HTTP connection than as an ASGI application under uvicorn.

All servers run the same handler, which decodes nothing and replies with a small object, so they differ only in the way
from the socket to the handler and back. One client sends its requests over one kept connection, in turns, or over a new
connection each time. The third way is the first behind TLS, with a certificate that openssl makes. See docs/adr/0006.
"""

from __future__ import annotations

import argparse
import json
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from benchmarks.http_client import HttpClient
from benchmarks.processes import cpu_s
from benchmarks.report import machine, markdown, parser_of
from kvrouter.router.base.common.shutdown import Shutdown
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.access.certificate import CertificateFiles, read_certificate
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.api.http.guard import Guard
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.http.http_connection import connection_factory
from kvrouter.router.serve.api.http.request import HttpRequest
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.api.scopes import OPEN_PATHS, RouteTable
from kvrouter.router.serve.api.versioned_paths import VersionedPaths
from tests.support.certificates import Authority

OWN, ASGI, TLS = WAYS = ("own connection", "ASGI under uvicorn", "own connection, TLS")
# A hot path, which `HttpApi` answers itself, and a path of the ASGI application behind it.
HOT, COLD = "/query_by_hash", "/workers"
# 16 and 512 block hashes as JSON.
BODY_BYTES = (340, 10_600)
# One in this many requests is sent over a new connection.
NEW_SHARE = 10
REPLY = {"instances": {f"w{number}": {"gpu": 8_192, "cpu": 8_192, "disk": 8_192} for number in range(8)}}


async def cold(scope: Any, receive: Any, send: Any) -> None:
    """Answer as the smallest possible ASGI application."""
    await receive()
    content = json.dumps(REPLY).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def asgi(api: HttpApi) -> Any:
    """Wrap `api` as an ASGI application."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        request = HttpRequest(
            scope["method"].encode(), "1.1", scope["raw_path"], scope["headers"], keep_alive=True, upgrades=False
        )
        request.refusal = api.refusal(request)
        while True:
            message = await receive()
            request.body += message["body"]
            if not message["more_body"]:
                break
        answer = api.respond(request)
        status, headers, content = answer if isinstance(answer, tuple) else await answer
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return application


def serve(way: str, pair: list[str] | None) -> None:
    """Print the server's port, and serve until the process is terminated.

    Args:
        way: One of WAYS.
        pair: The PEM files of certificate and key, or None.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    hot = {HOT: lambda request: REPLY}
    metrics = HttpMetrics(MetricRegistry())
    access = Access(LiveSettings(Config()), metrics.access, clock=time.monotonic, wall_clock=time.time)
    guard = Guard(access, RouteTable([], [("POST", HOT)]), OPEN_PATHS)
    api = HttpApi(
        hot,
        {},
        lambda method, path: None,
        cold,
        Config(),
        metrics,
        None,
        None,
        time.perf_counter,
        Shutdown(),
        paths=VersionedPaths(hot),
        guard=guard,
    )
    context: ssl.SSLContext | None = None
    if pair is not None:
        context = read_certificate(CertificateFiles(Path(pair[0]), Path(pair[1]))).context
    own = way != ASGI
    config = uvicorn.Config(
        cold if own else asgi(api),
        http=connection_factory(api, HttpLimits(), lambda: context) if own else "httptools",  # type: ignore[arg-type]
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


def measure(rounds: int, requests: int, folder: Path) -> list[list[str]]:
    """Return a row for each kind of request: its name, and the least and the median CPU time in us for each way."""
    sized_requests = [("POST", HOT, "x" * size, f"POST {HOT}, {size:,} bytes", True) for size in BODY_BYTES]
    kinds = [
        *sized_requests,
        ("GET", COLD, None, f"GET {COLD}", True),
        ("POST", HOT, "x" * BODY_BYTES[0], f"POST {HOT}, {BODY_BYTES[0]:,} bytes, on a new connection", False),
    ]
    authority = Authority(folder)
    pair = authority.issue("router")
    rows = []
    servers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.http_server",
                "--serve",
                way,
                *(("--pair", *map(str, pair)) if way == TLS else ()),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in WAYS
    ]
    try:
        ports = [int(server.stdout.readline()) for server in servers if server.stdout]
        for method, path, body, name, keeps in kinds:
            times_us: list[list[float]] = [[] for _ in WAYS]
            count = requests if keeps else requests // NEW_SHARE
            for _ in range(rounds):
                for way, server, port, figures in zip(WAYS, servers, ports, times_us, strict=True):
                    tls = authority.client() if way == TLS else None
                    client = HttpClient(port, tls)
                    question = client.request(method, path, body)
                    begun_s = cpu_s(server.pid)
                    for _ in range(count):
                        if not keeps:
                            client.close()
                            client = HttpClient(port, tls)
                        status, _ = client.send(question)
                        if status != 200:
                            raise RuntimeError(f"{name} was answered with {status}")
                    figures.append((cpu_s(server.pid) - begun_s) / count * 1e6)
                    client.close()
            rows.append([name, *(f"{min(way_us):.0f} ({statistics.median(way_us):.0f})" for way_us in times_us)])
    finally:
        for server in servers:
            server.terminate()
            server.wait()
    return rows


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--pair", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.pair)
    else:
        print(f"us of CPU time a request, least (median) of {given.rounds} rounds; {machine()}\n")
        with tempfile.TemporaryDirectory() as folder:
            print(markdown([["request", *WAYS], *measure(given.rounds, given.requests, Path(folder))]))
