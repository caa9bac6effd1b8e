# SPDX-License-Identifier: Apache-2.0
"""A client of `GET /events` in a thread, which keeps the events and the residency that they add up to."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections import defaultdict
from typing import Any, Self

CONNECT_TIMEOUT_S = 30.0


class EventReader:
    """A reader that reads from entry to exit."""

    def __init__(self, port: int, query: str = "", before: EventReader | None = None) -> None:
        """Connect to the router.

        Args:
            port: The router's port.
            query: The query string of the request, with its `?`.
            before: A reader that was cut off; this one resumes after its last event.
        """
        last_id = None if before is None else before.last_id
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CONNECT_TIMEOUT_S)
        self._connection.request(
            "GET", f"/events{query}", headers={} if last_id is None else {"Last-Event-ID": last_id}
        )
        self.answer = self._connection.getresponse()
        assert self._connection.sock is not None
        self._socket = self._connection.sock
        # Pings come every 15 s.
        self._socket.settimeout(60.0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.events: list[dict[str, Any]] = []
        self.comments: list[str] = []
        self.last_id: str = ""
        self._id = self._data = ""
        # The blocks on the GPU according to the events so far, by worker and group.
        self.held: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        if before is not None:
            self.held = before.held
        # Blocks that were stored twice, or removed without having been stored.
        self.contradictions = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            # Closing the socket would not wake the thread.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(CONNECT_TIMEOUT_S)
        self.answer.close()
        self._connection.close()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def of(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["type"] == event_type]

    def _read(self) -> None:
        try:
            for line in self.answer:
                self._take(line.decode().rstrip("\n"))
        except (OSError, ValueError, http.client.HTTPException, AttributeError):
            # The test closed or cut the connection.
            pass

    def _take(self, line: str) -> None:
        name, _, value = line.partition(": ")
        if name == "id":
            self._id = value
        elif not line:
            # Only the empty line completes an event; one that was cut off before it does not count.
            self.last_id, data, self._data = self._id, self._data, ""
            if data:
                event = json.loads(data)
                self._apply(event)
                self.events.append(event)
        elif line.startswith(":"):
            self.comments.append(line)
        elif name == "data":
            self._data = value

    def _apply(self, event: dict[str, Any]) -> None:
        worker, hashes = event.get("worker_id"), [int(block_hash, 16) for block_hash in event.get("block_hashes", ())]
        if event["type"] == "epoch":
            self.held.pop(worker, None)  # type: ignore[arg-type]
        elif event["type"] in ("stored", "removed"):
            held = self.held[worker][event["group_idx"]]  # type: ignore[index]
            stores = event["type"] == "stored"
            assert len(hashes) in (0, event["blocks"])
            self.contradictions += sum((block_hash in held) is stores for block_hash in hashes)
            if stores:
                held.update(hashes)
            else:
                held.difference_update(hashes)
