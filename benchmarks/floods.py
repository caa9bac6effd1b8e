# SPDX-License-Identifier: Apache-2.0
"""The cost of a flooding event source, or of many idle clients of GET /events, to a router.

Measured are the router's memory, its descriptors and the latency of questions, before, during and after each flood.
"""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import parser_of
from tests.support.flooding import begin, flooding
from tests.support.router_process import RouterProcess
from tests.support.zmtp_flooder import MODES

MODEL = "flooded"
CLIENTS = 256
BATCH_BLOCKS = 5_000
# The wait after a flood: a client that reads nothing is cut off after 30 s, and memory is returned to the system 2 s
# later.
AFTER_S = 36.0
CALM_S = 8.0


class Look:
    """A router process's memory and descriptors, and the latency of its answers, over some seconds."""

    def __init__(self, router: RouterProcess, seconds: float) -> None:
        latencies_ms: list[float] = []
        self.rss_mb, self.descriptors = 0.0, 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            router.request("POST", "/query", {"model": MODEL, "token_ids": list(range(64))})
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)
            self.rss_mb = max(self.rss_mb, rss_mb(router.pid))
            self.descriptors = max(self.descriptors, len(list(Path(f"/proc/{router.pid}/fd").iterdir())))
            time.sleep(0.005)
        self.p50_ms, self.p99_ms, self.most_ms = (float(np.percentile(latencies_ms, part)) for part in (50, 99, 100))

    def __str__(self) -> str:
        return (
            f"{self.rss_mb:7.0f} MB  {self.descriptors:5} fds  "
            f"p50 {self.p50_ms:6.1f}  p99 {self.p99_ms:7.1f}  max {self.most_ms:7.1f} ms"
        )


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def idle_clients(router: RouterProcess, count: int) -> list[socket.socket]:
    """Connect clients to /events that read nothing, and return their sockets."""
    clients = []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect(("127.0.0.1", router.port))
        client.sendall(b"GET /events?hashes=true HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        clients.append(client)
    return clients


def register(router: RouterProcess, **endpoints: str) -> None:
    router.request("POST", "/register", {"worker_id": "w", "model": MODEL, "patch_endpoint": "off", **endpoints})


def flood_clients(router: RouterProcess, seconds: float) -> None:
    with flooding("flooder.py", str(BATCH_BLOCKS)) as (port, flooder):
        register(router, endpoint=f"tcp://127.0.0.1:{port}")
        time.sleep(0.5)
        begin(flooder)
        print("  before ", Look(router, 2.0), flush=True)
        clients = idle_clients(router, CLIENTS)
        print("  during ", Look(router, seconds), flush=True)
    time.sleep(AFTER_S)
    print("  after  ", Look(router, 2.0), flush=True)
    for client in clients:
        client.close()


def flood_source(router: RouterProcess, mode: str, socket_type: str, seconds: float) -> None:
    with flooding("zmtp_flooder.py", mode, socket_type) as (port, _), flooding("flooder.py", "1") as (live_port, _):
        print("  before ", Look(router, 2.0), flush=True)
        endpoint = f"tcp://127.0.0.1:{port}"
        if socket_type == "PUB":
            register(router, endpoint=endpoint)
        else:
            register(router, endpoint=f"tcp://127.0.0.1:{live_port}", replay_endpoint=endpoint)
        print("  during ", Look(router, seconds), flush=True)
        print("   row   ", router.worker("w")["state"], router.worker("w")["reason"])
        router.unregister("w")
    time.sleep(CALM_S)
    print("  after  ", Look(router, 2.0), flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", help="one flood: events, or a mode of the source such as PUB:large_frames")
    arguments = parser.parse_args()
    floods = ["events", *(f"{kind}:{mode}" for kind in ("PUB", "ROUTER") for mode in MODES)]
    for name in floods:
        if arguments.only not in (None, name):
            continue
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder, RouterProcess(Path(folder)) as router:
            # A second worker of the model, so that questions always have an answer.
            body = {"worker_id": "quiet", "model": MODEL, "url": "http://127.0.0.1:9"}
            router.request("POST", "/register", body)
            if name == "events":
                flood_clients(router, arguments.seconds)
            else:
                kind, _, mode = name.partition(":")
                flood_source(router, mode, kind, arguments.seconds)


if __name__ == "__main__":
    main()
