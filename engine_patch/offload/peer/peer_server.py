# SPDX-License-Identifier: Apache-2.0
"""The thread that lends this engine's chunks: it receives messages, and the `Lender` or the `Warmer` answers them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from kvrouter.engine_patch.offload.peer.lender import Lender
from kvrouter.engine_patch.offload.peer.peer_access import PeerAccess
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource
from kvrouter.engine_patch.offload.peer.peer_wire import (
    MAX_MESSAGE_BYTES,
    ToReader,
    ToSource,
    encode,
    read_by_source,
)
from kvrouter.engine_patch.offload.peer.warmer import Warmer
from kvrouter.engine_patch.setup.client_gate import ClientGate
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.peer.hand_over import HandOverRequest, Refused

# How long the thread waits for a message before it looks whether a loan has ended or the engine ends.
POLL_MS = 100
# The same while a loan waits for the disk: what may be read in this time is 8 GB/s.
WAITING_POLL_MS = 2
# Messages that wait for one reader, or of one reader; further ones wait at the sender.
HIGH_WATER_MESSAGES = 256


class PeerServer:
    """A ROUTER socket and its thread."""

    def __init__(
        self,
        host: str,
        port: int,
        access: PeerAccess,
        lender: Lender,
        warmer: Warmer,
        clock: Callable[[], float],
        log: ThrottledLog,
    ) -> None:
        """Bind and start. Raise zmq.ZMQError if the address is taken."""
        self._lender = lender
        self._warmer = warmer
        self._clock = clock
        self._log = log
        self._gate = None if access.clients is None else ClientGate(access.clients, self._count_refused, log)
        self._context = zmq.Context() if self._gate is None else self._gate.context
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            access.protect_server(self._socket)
            self._socket.bind(PeerSource(host, port).endpoint)
        except zmq.ZMQError:
            self._socket.close()
            self._context.term()
            raise
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvrouter-lend")
        self._thread.start()

    def close(self) -> None:
        """End the thread, all loans and a hand-over."""
        self._is_closing.set()
        self._thread.join()
        self._warmer.close()
        self._lender.close()
        self._context.term()

    def _count_refused(self) -> None:
        self._lender.counts.refused_readers += 1

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                try:
                    if self._socket.poll(WAITING_POLL_MS if self._lender.is_waiting else POLL_MS):
                        self._serve()
                    for reader, reply in self._lender.advance():
                        self._send(reader, reply)
                    self._lender.expire(self._clock())
                except Exception as error:
                    # The next reader must be served, too; the pause keeps an error that repeats from using a core.
                    self._log_fault(error)
                    self._is_closing.wait(POLL_MS / 1000)
        finally:
            self._socket.close()

    def _serve(self) -> None:
        """Answer the messages that wait."""
        for _ in range(HIGH_WATER_MESSAGES):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = read_by_source(frames[1]) if len(frames) == 2 else None
            if message is None:
                self._lender.counts.bad_messages += 1
                reply: ToReader | None = Refused(PeerMiss.PROTOCOL.value, "the source cannot read this message")
            else:
                reply = self._answer(frames[0], message)
            if reply is not None:
                self._send(frames[0], reply)

    def _send(self, reader: bytes, reply: ToReader) -> None:
        # A ROUTER socket drops answers to a reader that has gone or does not read.
        self._socket.send_multipart([reader, encode(reply)], zmq.NOBLOCK)

    def _answer(self, reader: bytes, message: ToSource) -> ToReader | None:
        """Return the answer of the lender or the warmer; a fault is an answer, too, so that the reader does not wait."""
        try:
            if isinstance(message, HandOverRequest):
                return self._warmer.answer(message)
            return self._lender.answer(reader, message, self._clock())
        except Exception as error:
            self._log_fault(error)
            return Refused(PeerMiss.FAULT.value, f"the source could not serve this message: {error!r}")

    def _log_fault(self, error: Exception) -> None:
        self._log.warning(f"lend {type(error).__name__}", "a peer could not be served", error=repr(error))
