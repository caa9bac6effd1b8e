# SPDX-License-Identifier: Apache-2.0
"""A process that publishes batches encoded beforehand, one socket a worker, at a given rate, for any subscriber.

Commands come on stdin, one a line, and each is answered by one line of JSON: `wait` until every socket has a
subscriber; `send COUNT RATE` the next COUNT batches at RATE blocks/s (0: at full speed); `quit`. Sockets are XPUB,
which on the wire is PUB that reports subscriptions, without a high-water mark: nothing is ever dropped, so any delay is
the subscriber's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from benchmarks.workload import Frame, read_frames

# Shorter pauses are skipped when the rate is limited. At 50,000 blocks/s and 128 blocks a batch, 1 ms is 0.4 of a
# batch.
MIN_SLEEP_S = 0.0005


def tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def wait_for_subscribers(sockets: list[zmq.Socket[bytes]], timeout_s: float) -> bool:
    """Return whether each socket got a subscription in time."""
    deadline = time.monotonic() + timeout_s
    for socket in sockets:
        while True:
            if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                return False
            if socket.recv()[:1] == b"\x01":
                break
    return True


def send(sockets: list[zmq.Socket[bytes]], frames: list[Frame], rate: float) -> None:
    """Send frames, at `rate` blocks/s unless it is 0, and report when that began and ended (CLOCK_MONOTONIC)."""
    start = time.monotonic()
    sent = 0
    for frame in frames:
        if rate:
            ahead = sent / rate - (time.monotonic() - start)
            if ahead > MIN_SLEEP_S:
                time.sleep(ahead)
        sockets[frame.worker].send_multipart((b"", frame.seq.to_bytes(8, "big"), frame.payload))
        sent += frame.blocks
    tell(start=start, end=time.monotonic(), blocks=sent, batches=len(frames))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", type=Path, help="file from workload.write_frames")
    parser.add_argument("--workers", type=int, required=True, help="sockets to open")
    arguments = parser.parse_args()
    frames = read_frames(arguments.frames)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # libzmq's default is 1,023 sockets.
    context.set(zmq.MAX_SOCKETS, arguments.workers + 1)
    sockets = []
    for _ in range(arguments.workers):
        socket = context.socket(zmq.XPUB)
        socket.set_hwm(0)
        socket.bind("tcp://127.0.0.1:*")
        sockets.append(socket)
    tell(endpoints=[socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in sockets])
    at = 0
    for line in sys.stdin:
        match line.split():
            case ["wait"]:
                tell(subscribed=wait_for_subscribers(sockets, 30))
            case ["send", count, rate]:
                send(sockets, frames[at : at + int(count)], float(rate))
                at += int(count)
            case _:
                break
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
