# SPDX-License-Identifier: Apache-2.0
"""How far engines' event streams have come, asked of their replay sockets: what a router must show before it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import zmq

ANSWER_MS = 60_000
_END = b"\xff" * 8


class Published:
    """Some engines by name. Closed on exit. Raises zmq.Again where one does not answer in a minute."""

    def __init__(self, replay_endpoints: Mapping[str, str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = {name: self._context.socket(zmq.DEALER) for name in replay_endpoints}
        self._seqs = dict.fromkeys(replay_endpoints, -1)
        for name, endpoint in replay_endpoints.items():
            self._sockets[name].setsockopt(zmq.RCVTIMEO, ANSWER_MS)
            self._sockets[name].connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def last_seqs(self) -> dict[str, int]:
        """Of all that each engine has handed to its publisher by now; -1 before the first.

        The publisher's thread sends one batch between two answers (vLLM 0.32.0 distributed/kv_events.py), so two that are equal
        mean that none is left."""
        before = None
        while before != (now := self._asked()):
            before = now
        return now

    def _asked(self) -> dict[str, int]:
        # All at once: an idle publisher answers ten times a second.
        for name, socket in self._sockets.items():
            socket.send_multipart([b"", max(self._seqs[name], 0).to_bytes(8, "big")])
        for name, socket in self._sockets.items():
            while (seq := socket.recv_multipart()[2]) != _END:
                self._seqs[name] = max(self._seqs[name], int.from_bytes(seq, "big"))
        return dict(self._seqs)
