# SPDX-License-Identifier: Apache-2.0
"""A process that sends each request over a new connection, as fast as it can, until nobody listens.

At its end it reports how the requests ended.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import Counter

WAIT_S = 30.0
# After this many refusals in a row, with this pause between them, the process concludes that nobody listens.
REFUSALS = 3
REFUSAL_PAUSE_S = 0.2


def one(port: int, request: bytes) -> str:
    with socket.socket() as client:
        client.settimeout(WAIT_S)
        try:
            client.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            return "refused"
        try:
            client.sendall(request)
            answer = b""
            while piece := client.recv(65_536):
                answer += piece
        except OSError as error:
            return f"broken: {type(error).__name__}"
    if not answer:
        return "broken: closed without an answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return (
        "served" if head.startswith(b"HTTP/1.1 200 ") and [len(body)] == [*map(int, lengths)] else f"broken: {head!r}"
    )


def main(port: int, request: bytes) -> None:
    counts: Counter[str] = Counter()
    refusals = 0
    while refusals < REFUSALS:
        outcome = one(port, request)
        counts[outcome] += 1
        refusals = refusals + 1 if outcome == "refused" else 0
        if counts["served"] == 1:
            print("begun", flush=True)
            counts["served"] += 1
        if outcome == "refused":
            time.sleep(REFUSAL_PAUSE_S)
    print(json.dumps(counts), flush=True)


class Hammer:
    """The running process; the constructor returns once the first request has been served."""

    def __init__(self, port: int, request: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request)
        self._process.stdin.close()
        assert self._process.stdout.readline() == b"begun\n"

    def ended(self) -> dict[str, int]:
        """Wait until nobody listens, and return the number of requests by the way they ended."""
        assert self._process.stdout is not None
        counts: dict[str, int] = json.loads(self._process.stdout.read())
        self._process.stdout.close()
        self._process.wait(WAIT_S)
        return counts

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin.buffer.read())
