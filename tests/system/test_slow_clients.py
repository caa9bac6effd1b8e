# SPDX-License-Identifier: Apache-2.0
"""A running router cuts clients that send a byte a second, and serves all others meanwhile."""

from __future__ import annotations

import select
import socket
import time

from tests.support.router_process import RouterProcess

SLOW_CLIENTS = 200
# The limit for a head is 10 s.
WAIT_S = 40.0


def test_slow_clients_are_cut_while_others_are_served(router: RouterProcess) -> None:
    slow = [socket.create_connection(("127.0.0.1", router.port)) for _ in range(SLOW_CLIENTS)]
    try:
        for client in slow:
            client.sendall(b"POST /query HTTP/1.1\r\nhost: localhost\r\nx-a: ")
        left = set(slow)
        deadline = time.monotonic() + WAIT_S
        while left:
            assert time.monotonic() < deadline, f"{len(left)} are still there"
            readable, _, _ = select.select([*left], [], [], 0)
            left -= {*readable}
            for client in left:
                client.sendall(b"a")
            assert router.request("GET", "/health")["status"] in ("ok", "degraded")
            time.sleep(1)
        answers = [client.recv(4_096) for client in slow]
    finally:
        for client in slow:
            client.close()
    assert all(answer.startswith(b"HTTP/1.1 408 ") and b"did not come in 10 s" in answer for answer in answers)
    assert router.metric("kvrouter_http_connections_cut_total", reason="head_time") == SLOW_CLIENTS
    assert "Traceback" not in router.log_tail()
