# SPDX-License-Identifier: Apache-2.0
"""Clients of GET /events that read and drop all events, as a child process.

When stdin closes, it prints how many bytes and events they received.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys

HEAD = b"GET /events%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
READ_BYTES = 1 << 18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--query", default="")
    arguments = parser.parse_args()
    selector = selectors.DefaultSelector()
    received = [0, 0]
    for _ in range(arguments.count):
        client = socket.create_connection(("127.0.0.1", arguments.port))
        client.sendall(HEAD % arguments.query.encode())
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("{}", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                print(json.dumps({"bytes": received[0], "events": received[1]}), flush=True)
                return
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(READ_BYTES)
            if not data:
                raise SystemExit("the router cut a client off")
            received[0] += len(data)
            received[1] += data.count(b"\nevent: ")


if __name__ == "__main__":
    main()
