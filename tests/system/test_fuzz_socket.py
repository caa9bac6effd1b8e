# SPDX-License-Identifier: Apache-2.0
"""Garbage on the event socket of a running router: it is counted, and harms neither the process nor any answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvrouter.events.vllm.codec import encode_batch
from tests.support.fake_engine import NewEngine, hashes, prompt, removed, stored
from tests.support.router_process import RouterProcess

MESSAGES = 10_000
# Messages sent at once before the router must have read them, so that the PUB's high-water mark drops nothing.
BURST = 500
TOKENS = prompt(1)


def valid_payloads() -> list[bytes]:
    events: list[Any] = [stored(TOKENS, 0, 12), *removed(hashes(TOKENS)[:3]), stored(prompt(2), 0, 4, 1, kind="mamba")]
    return [
        encode_batch(1.0, events, 0, layout=layout, hash_form=form)
        for layout in ("map", "array")
        for form in ("int", "bytes32", "bytes16")
    ]


def mutated(draw: random.Random, payload: bytes) -> bytes:
    """Damage a payload in one of the ways that wires and bugs damage things."""
    how = draw.randrange(6)
    if how == 0:
        return draw.randbytes(draw.randrange(200))
    if how == 1:
        return payload[: draw.randrange(len(payload))]
    if how == 2:
        damaged = bytearray(payload)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        return bytes(damaged)
    if how == 3:
        at = draw.randrange(len(payload))
        return payload[:at] + draw.randbytes(draw.randint(1, 20)) + payload[at:]
    if how == 4:
        depth = draw.choice([1, 50, 3_000])
        return b"\x93\x01\x91" + b"\x91" * depth + b"\x01\xc0" if draw.random() < 0.7 else b"\x91" * depth
    event = {"type": draw.choice(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Nonsense", 7])}
    for name in (
        "block_hashes",
        "token_ids",
        "block_size",
        "medium",
        "group_idx",
        "kv_cache_spec_kind",
        "parent_block_hash",
    ):
        if draw.random() < 0.6:
            event[name] = draw.choice(
                [None, -1, 2**63, "x", [], [1, "x"], {"a": 1}, b"\xff" * 5, 1.5, [2**64 - 1], True]
            )
    return msgspec.msgpack.encode([1.0, [event], draw.choice([0, None, "x"])])


def messages(draw: random.Random) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the frames of every message, with whether the message takes the next sequence number."""
    payloads = valid_payloads()
    seq = 0
    for _ in range(MESSAGES):
        if draw.random() < 0.05:
            frames = [draw.randbytes(draw.randrange(12)) for _ in range(draw.randint(1, 6))]
            yield ([b"", *frames] if len(frames) != 2 or len(frames[0]) != 8 else [b"", b"short", b""]), False
        else:
            yield [b"", seq.to_bytes(8, "big"), mutated(draw, draw.choice(payloads))], True
            seq += 1


@pytest.fixture
def publisher(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    # An XPUB socket receives the subscription, so the test can wait for it.
    socket = context.socket(zmq.XPUB)
    socket.sndhwm = 0
    yield socket
    socket.close(linger=0)


def test_garbage_costs_only_itself(router: RouterProcess, new_engine: NewEngine, publisher: zmq.Socket[bytes]) -> None:
    bystander = new_engine()
    bystander.join(router, "bystander", "fuzz")
    router.wait_seen("bystander", bystander.publish(stored(TOKENS, 0, 12)))
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    victim = {"worker_id": "victim", "model": "fuzz", "endpoint": f"tcp://127.0.0.1:{port}"}
    router.request("POST", "/register", victim)
    router.wait_connected("victim", publisher.recv)

    last = -1
    for sent, (frames, counted) in enumerate(messages(random.Random(20261)), 1):
        publisher.send_multipart(frames)
        last += counted
        if sent % BURST == 0:
            router.wait_seen("victim", last)
    row = router.wait_seen("victim", last)
    assert row["last_event_age_s"] is not None

    good = prompt(9)
    for seq, event in ((last + 1, stored(good, 0, 7)), (last + 2, stored(good, 7, 12))):
        publisher.send_multipart([b"", seq.to_bytes(8, "big"), encode_batch(2.0, [event], 0)])
    row = router.wait_seen("victim", last + 2)
    assert row["residency"].get("g0:GPU", 0) >= 12, row
    hashes_of_good = {"model": "fuzz", "block_hashes": hashes(good)}
    instances = router.request("POST", "/query_by_hash", hashes_of_good)["instances"]
    assert instances["bystander"]["gpu"] == 0
    # Garbage may have contradicted itself about a group. The router then withholds credit, but never without a reason.
    assert instances["victim"]["gpu"] == 192 or instances["victim"]["reason"]
    answer = router.request("POST", "/query", {"model": "fuzz", "token_ids": TOKENS})["instances"]["bystander"]
    assert answer["gpu"] == 192 and answer["state"] == "live"
    assert router.metric("kvrouter_ingest_broken_events_total", worker="victim") > MESSAGES / 10
    assert router.metric("kvrouter_ingest_unknown_events_total", worker="victim") > 0
    assert router.metric("kvrouter_ingest_broken_events_total", worker="bystander") == 0
    assert "Traceback" not in router.log_tail()
