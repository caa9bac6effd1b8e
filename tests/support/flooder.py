# SPDX-License-Identifier: Apache-2.0
"""A program with an engine's PUB socket that publishes as fast as it can.

    python flooder.py BLOCKS

It prints its port, starts to publish at a line on stdin, and ends by a signal. A batch has BLOCKS block hashes; they
are stored by one batch and removed by the next.
"""

from __future__ import annotations

import sys

import numpy as np
import zmq

from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.wire import WireRemoved, WireStored

PAIRS = 32


def main() -> None:
    blocks = int(sys.argv[1])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.sndhwm = 1_000
    # The socket waits if the reader does not keep up, so the flood is a stream without gaps.
    publisher.setsockopt(zmq.XPUB_NODROP, 1)
    print(publisher.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    rng = np.random.default_rng(1)
    payloads: list[bytes] = []
    for _ in range(PAIRS):
        hashes = [int(block_hash) for block_hash in rng.integers(2**33, 2**63, blocks)]
        stored = WireStored(hashes, 7, [], 16, None, "GPU", None, None, 0, "full_attention")
        payloads += [encode_batch(1.0, [event], 0) for event in (stored, WireRemoved(hashes, "GPU", 0))]
    sys.stdin.readline()
    seq = 0
    while True:
        publisher.send_multipart([b"", seq.to_bytes(8, "big"), payloads[seq % len(payloads)]])
        seq += 1


if __name__ == "__main__":
    main()
