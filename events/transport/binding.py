# SPDX-License-Identifier: Apache-2.0
"""Binding of a socket to an address that the same process may have used until just now."""

from __future__ import annotations

import time

import zmq

# ZMQ frees a closed socket's address some milliseconds after close, so a publisher that restarts on the same port must
# try again.
REBIND_TIMEOUT_S = 1.0
REBIND_PAUSE_S = 0.01


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind a socket, and try again while the address is in use, for a second at most. Raises zmq.ZMQError.

    Returns the endpoint as bound, with the port that the system chose in place of 0 or *.
    """
    give_up_s = time.monotonic() + REBIND_TIMEOUT_S
    while True:
        try:
            socket.bind(endpoint)
            break
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() >= give_up_s:
                raise
            time.sleep(REBIND_PAUSE_S)
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound.rstrip("\0") or endpoint
