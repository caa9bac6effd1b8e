# SPDX-License-Identifier: Apache-2.0
"""An event publisher with vLLM's framing: PUB for the live stream, ROUTER for replay, a ring of sent batches.

A live message is `(topic, seq, payload)`. For a replay, a DEALER sends `(b"", start_seq)` and gets
`(b"", topic, seq, payload)` for every batch of the ring from there on, then `(b"", b"", END_SEQ, b"")`. Numbers are 8
bytes, big-endian, and start at `first_seq` in each life: the wire has no epoch. Both sockets belong to one thread, as
in vLLM 0.32.0 (kv_events.py ZmqEventPublisher), so a replay never overtakes the live stream.

Differences from vLLM: both endpoints are always bound; a replay request wakes the idle thread at once, while vLLM needs
up to 100 ms; a long replay is queued whole, while vLLM's ROUTER drops what exceeds its high-water mark of 1,000. The
publisher does not encode (see `codec.encode_batch`). When its queue is full, `publish` blocks, as vLLM's does.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import zmq

from kvrouter.events.transport.alarm import Alarm
from kvrouter.events.transport.binding import bind
from kvrouter.events.vllm.wire import END_SEQ, SEQ_BYTES

log = logging.getLogger(__name__)

# The number of batches that are sent before the replay socket is checked again.
_BATCHES_A_TURN = 64


class EventPublisher:
    """A publisher of encoded batches, in order, each under the next seq. Any thread may call `publish`.

    The queue and its counts are under one lock; the sockets belong to the publisher's thread.
    """

    # The bound addresses, with the port that the system chose in place of 0 or *.
    endpoint: str
    replay_endpoint: str | None

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        first_seq: int = 0,
    ) -> None:
        """Bind both sockets and start the thread. Raises zmq.ZMQError if an address cannot be bound.

        Args:
            endpoint: The address of the live stream.
            replay_endpoint: The address for replays; None for no replay.
            context: Makes the sockets.
            topic: The topic of every live message.
            buffer_steps: Batches that are kept for replay; the default is vLLM's, as are those below.
            hwm: Batches that a slow subscriber may lag behind before PUB drops silently.
            max_queue_size: Batches that may wait for the thread.
            first_seq: The seq of the first batch.
        """
        self._topic = topic.encode()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._max_queue_size = max_queue_size
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes, bool]] = deque()
        # Batches that were accepted and not yet sent: the queue, and those that the thread has taken.
        self._unsent = 0
        self._next_seq = first_seq
        self._drop = 0
        self._closed = False
        self._woken = False

        self._pub = context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub.set_hwm(hwm)
            self.endpoint = bind(self._pub, endpoint)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.set_hwm(0)
                self.replay_endpoint = bind(self._replay, replay_endpoint)
        except BaseException:
            self._close_sockets()
            raise
        self._alarm = Alarm()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvrouter-publisher")
        self._thread.start()

    @property
    def next_seq(self) -> int:
        """Seq of the next published batch."""
        return self._next_seq

    def publish(self, payload: bytes) -> None:
        """Queue one batch. Blocks while the queue is full. Raises RuntimeError if the publisher is closed."""
        with self._changed:
            while self._unsent >= self._max_queue_size and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the event publisher is closed")
            dropped = self._drop > 0
            if dropped:
                self._drop -= 1
            self._queue.append((self._next_seq, payload, not dropped))
            self._unsent += 1
            self._next_seq += 1
            self._wake()

    def skip_seq(self, count: int = 1) -> None:
        """Use up seqs without batches: a gap that replay cannot fill, as after a failed encode in vLLM."""
        with self._changed:
            self._next_seq += count

    def drop_next(self, count: int = 1) -> None:
        """Keep the next `count` batches for replay without sending them, as when PUB drops for a slow subscriber."""
        with self._changed:
            self._drop += count

    def flush(self, timeout_s: float) -> None:
        """Wait until all published batches are handed to ZMQ. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._unsent == 0, timeout_s):
                raise TimeoutError(f"{self._unsent} batches still queued after {timeout_s} s")

    def close(self) -> None:
        """Send the queued batches, end the thread and close the sockets. Safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._wake()
        self._thread.join()
        self._close_sockets()
        self._alarm.close()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._alarm.ring()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._alarm, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            try:
                ready = dict(poller.poll(0 if self._queue or self._closed else None))
                if self._replay is not None and self._replay in ready:
                    self._answer_replay(self._replay)
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    self._give_up()
                    return
                log.warning("replay request failed", extra={"endpoint": self.endpoint, "error": str(error)})
            with self._changed:
                if self._woken:
                    self._alarm.silence()
                    self._woken = False
                turn = [self._queue.popleft() for _ in range(min(_BATCHES_A_TURN, len(self._queue)))]
                if not turn and self._closed:
                    return
            for seq, payload, sent in turn:
                self._send(seq, payload, sent)
            with self._changed:
                self._unsent -= len(turn)
                self._changed.notify_all()

    def _send(self, seq: int, payload: bytes, sent: bool) -> None:
        if sent:
            try:
                self._pub.send_multipart((self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload))
            except zmq.ZMQError as error:
                log.warning("batch not sent", extra={"endpoint": self.endpoint, "seq": seq, "error": str(error)})
        self._ring.append((seq, payload))

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3:
            log.warning("invalid replay request", extra={"endpoint": self.endpoint, "frames": len(frames)})
            return
        client, _, start = frames
        first = int.from_bytes(start, "big")
        for seq, payload in self._ring:
            if seq >= first:
                replay.send_multipart((client, b"", self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload))
        replay.send_multipart((client, b"", b"", END_SEQ, b""))

    def _give_up(self) -> None:
        # The context was terminated by its owner: nothing can be sent, so no caller may wait for it.
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._unsent = 0
            self._changed.notify_all()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
