# SPDX-License-Identifier: Apache-2.0
"""The form of a fuzzing input, and its mutations.

An input is a short story of steps at one worker's sockets. It is encoded as bytes, so that any fuzzer can keep, shrink
and replay it. `unpack` turns any bytes into steps, so no input is wasted. Mutations change messages or their
MessagePack.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

_HEAD = struct.Struct("<BQH")
MAX_STEPS = 32


class Step(NamedTuple):
    """One step of a story; each target defines its kinds, and some kinds use no `seq` or `payload`."""

    kind: int
    seq: int = 0
    payload: bytes = b""


def pack(steps: list[Step]) -> bytes:
    return b"".join(_HEAD.pack(step.kind, step.seq % 2**64, len(step.payload)) + step.payload for step in steps)


def unpack(data: bytes) -> list[Step]:
    steps: list[Step] = []
    at = 0
    while at + _HEAD.size <= len(data) and len(steps) < MAX_STEPS:
        kind, seq, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        steps.append(Step(kind, seq, data[at : at + size]))
        at += size
    return steps


NUMBERS = (0, 1, -1, 15, 16, 17, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
# Values that no peer should be able to send, and values that some peers once sent.
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(None, True, False, 0.0, 1.5, float("nan"), float("inf"), "", "x" * 300, "GPU", "cpu", "STORAGE", "\x00:g1 {}"),
    *(b"", b"\xff" * 5, b"\xff" * 16, b"\xff" * 32, b"\xff" * 64, [], {}, [[]], [None], [0] * 20, {"a": 1}),
    *("full_attention", "sliding_window", "mamba", "chunked_local_attention", "stored", "removed", "cleared"),
    *("BlockStored", "BlockRemoved", "AllBlocksCleared", "events", "heartbeat", "snapshot"),
)
# MessagePack headers that announce more than follows: arrays, maps, binaries, strings and extensions of up to 4 Gi.
HUGE = tuple(bytes([first]) + b"\xff" * size for first, size in ((0xDC, 2), (0xDD, 4), (0xDE, 2), (0xDF, 4), (0xC6, 4)))
HUGE += tuple(bytes([first]) + b"\xff" * size for first, size in ((0xDB, 4), (0xC9, 5), (0xCF, 8), (0xD9, 1)))
DEPTHS = (2, 60, 600, 6_000)


def mutated(data: bytes, rng: random.Random, donors: list[bytes]) -> bytes:
    """Return `data` with one to four mutations.

    Args:
        data: The input.
        rng: The source of randomness.
        donors: Other inputs, parts of which may be inserted.
    """
    steps = unpack(data) or [Step(0)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _mutate(steps, rng, donors)
    return pack(steps)


def _mutate(steps: list[Step], rng: random.Random, donors: list[bytes]) -> None:
    at = rng.randrange(len(steps))
    step = steps[at]
    roll = rng.random()
    if roll < 0.05:
        steps.insert(rng.randrange(len(steps) + 1), step)
    elif roll < 0.10 and len(steps) > 1:
        del steps[at]
    elif roll < 0.14:
        other = rng.randrange(len(steps))
        steps[at], steps[other] = steps[other], steps[at]
    elif roll < 0.20:
        steps[at] = step._replace(seq=rng.choice((step.seq + 1, step.seq - 1, step.seq + 1_000, *NUMBERS[:14])))
    elif roll < 0.24:
        steps[at] = step._replace(kind=rng.randrange(16))
    elif roll < 0.32 and donors:
        donor = unpack(rng.choice(donors))
        if donor:
            start = rng.randrange(len(donor))
            steps[at:at] = donor[start : start + rng.randint(1, 4)]
            del steps[MAX_STEPS:]
    else:
        steps[at] = step._replace(payload=mutated_payload(step.payload, rng)[:0xFFFF])


def mutated_payload(payload: bytes, rng: random.Random) -> bytes:
    """Return a message damaged in a way in which networks, bugs or other versions damage messages."""
    if not payload:
        return rng.randbytes(rng.randrange(40))
    if rng.random() < 0.5:
        try:
            value = msgspec.msgpack.decode(payload)
            return msgspec.msgpack.encode(_changed(value, rng))
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass
    return rng.choice(_BYTE_CHANGES)(payload, rng)


def _changed(value: Any, rng: random.Random) -> Any:
    """Return the value with one randomly chosen part replaced, doubled or dropped."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        roll = rng.random()
        if roll < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        if roll < 0.15:
            return value | {rng.choice(("later", 7, key)): rng.choice(VALUES)}
        return value | {key: _changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        roll = rng.random()
        if roll < 0.1:
            return value[:at] + value[at + 1 :]
        if roll < 0.2:
            return value[: at + 1] + value[at:]
        return [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return max(-(2**63), min(2**64 - 1, value + rng.choice((-1, 1, 8, 1 << 32))))
    return rng.choice(VALUES)


def _flipped(payload: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _cut(payload: bytes, rng: random.Random) -> bytes:
    return payload[: rng.randrange(len(payload))]


def _inserted(payload: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(payload) + 1)
    return payload[:at] + rng.randbytes(rng.randint(1, 12)) + payload[at:]


def _overwritten(payload: bytes, rng: random.Random) -> bytes:
    """Return the payload with one part of it overwritten by another part."""
    size = rng.randint(1, min(32, len(payload)))
    source, target = rng.randrange(len(payload) - size + 1), rng.randrange(len(payload) - size + 1)
    return payload[:target] + payload[source : source + size] + payload[target + size :]


def _promised(payload: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(payload))
    return payload[:at] + rng.choice(HUGE) + payload[at + rng.randrange(2) :]


def _nested(payload: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(payload))
    opener = rng.choice((b"\x91", b"\x81\x00", b"\x81\xa1a"))
    return payload[:at] + opener * rng.choice(DEPTHS) + payload[at:]


_BYTE_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flipped, _flipped, _cut, _inserted, _overwritten, _promised),
    _nested,
)
