# SPDX-License-Identifier: Apache-2.0
"""Frames, ring and faults of the publisher, read with bare sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from kvrouter.events.vllm.publisher import EventPublisher

ANY = "tcp://127.0.0.1:0"
TIMEOUT_MS = 5_000


def seq8(seq: int) -> bytes:
    return seq.to_bytes(8, "big", signed=True)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    # The call term() hangs if a socket is left open, so a leak cannot pass.
    context = zmq.Context()
    yield context
    context.term()


def subscriber(context: zmq.Context[zmq.Socket[bytes]], publisher: EventPublisher) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.subscribe(b"")
    socket.connect(publisher.endpoint)
    # PUB drops messages until it knows the subscription, so publish until something arrives.
    socket.setsockopt(zmq.RCVTIMEO, 20)
    while True:
        publisher.publish(b"warm")
        try:
            last = int.from_bytes(socket.recv_multipart()[1], "big")
        except zmq.Again:
            continue
        break
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    while last != publisher.next_seq - 1:
        last = int.from_bytes(socket.recv_multipart()[1], "big")
    return socket


def replay(context: zmq.Context[zmq.Socket[bytes]], publisher: EventPublisher, start: int) -> list[list[bytes]]:
    assert publisher.replay_endpoint is not None
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", seq8(start)])
        frames = [dealer.recv_multipart()]
        while frames[-1][-2] != seq8(-1):
            frames.append(dealer.recv_multipart())
        return frames


def test_a_live_message_is_topic_seq_and_payload(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(ANY, context=context, topic="kv", first_seq=5) as publisher:
        with subscriber(context, publisher) as socket:
            seq = publisher.next_seq
            publisher.publish(b"one")
            publisher.publish(b"two")
            assert socket.recv_multipart() == [b"kv", seq8(seq), b"one"]
            assert socket.recv_multipart() == [b"kv", seq8(seq + 1), b"two"]
        assert publisher.replay_endpoint is None


def test_a_replay_answer_ends_with_the_end_marker(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(ANY, "tcp://127.0.0.1:*", context=context, topic="kv") as publisher:
        for number in range(4):
            publisher.publish(b"%d" % number)
        publisher.flush(5)
        end = [b"", b"", seq8(-1), b""]
        assert replay(context, publisher, 2) == [[b"", b"kv", seq8(2), b"2"], [b"", b"kv", seq8(3), b"3"], end]
        assert replay(context, publisher, 9) == [end]
        assert len(replay(context, publisher, 0)) == 5


def test_an_answer_longer_than_zmqs_default_mark_is_whole(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        for _ in range(5_000):
            publisher.publish(b"x")
        publisher.flush(10)
        assert len(replay(context, publisher, 0)) == 5_001


def test_the_ring_keeps_the_last_batches(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(ANY, ANY, context=context, buffer_steps=3) as publisher:
        for number in range(10):
            publisher.publish(b"%d" % number)
        publisher.flush(5)
        assert [frames[-1] for frames in replay(context, publisher, 0)] == [b"7", b"8", b"9", b""]


def test_skipped_seqs_and_dropped_batches_leave_gaps(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher, subscriber(context, publisher) as socket:
        first = publisher.next_seq
        publisher.skip_seq(2)
        publisher.drop_next(1)
        publisher.publish(b"dropped")
        publisher.publish(b"sent")
        assert socket.recv_multipart() == [b"", seq8(first + 3), b"sent"]
        assert [frames[-2:] for frames in replay(context, publisher, first)] == [
            [seq8(first + 2), b"dropped"],
            [seq8(first + 3), b"sent"],
            [seq8(-1), b""],
        ]


def test_a_bad_request_is_ignored(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        assert publisher.replay_endpoint is not None
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.replay_endpoint)
            dealer.send_multipart([b"only one frame"])
            dealer.send_multipart([b"", b"x" * 100, b"", b""])
            assert replay(context, publisher, 0) == [[b"", b"", seq8(-1), b""]]


def test_a_full_queue_blocks_until_closed(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(ANY, context=context, max_queue_size=1)
    refused = threading.Event()

    def publish() -> None:
        try:
            while True:
                publisher.publish(b"x")
        except RuntimeError:
            refused.set()

    thread = threading.Thread(target=publish)
    thread.start()
    publisher.close()
    thread.join(10)
    assert refused.is_set()


def test_close_sends_what_is_queued_and_frees_the_address(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher(ANY, ANY, context=context)
    for _ in range(1_000):
        publisher.publish(b"x")
    publisher.close()
    publisher.close()
    publisher.flush(0)
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(b"x")
    EventPublisher(publisher.endpoint, publisher.replay_endpoint, context=context).close()


def test_an_address_that_cannot_be_bound_leaves_nothing_open(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(zmq.ZMQError):
        EventPublisher(ANY, "tcp://256.0.0.1:1", context=context)
