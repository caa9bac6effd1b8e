# SPDX-License-Identifier: Apache-2.0
"""Messages of the engine patch on the wire: written, skipped and refused fields; and the patch's endpoints."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.events.patch.decode import MAX_EPOCH_CHARS, Unreadable, read_answer, read_report
from kvrouter.events.patch.hello import reachable
from kvrouter.events.patch.messages import (
    CatalogMessage,
    DeclaredCatalog,
    DeclaredGroup,
    Events,
    HashExample,
    Heartbeat,
    Hello,
    HelloRequest,
    PeerAddress,
    PlaceSummary,
    Refused,
    ReportCleared,
    ReportRemoved,
    ReportStored,
    Request,
    SnapshotPart,
    SnapshotRequest,
    pack_hashes,
    reports_endpoint,
    requests_endpoint,
    unpack_hashes,
)
from kvrouter.events.vllm.messages import MAX_ERROR_CHARS
from kvrouter.events.vllm.wire import read_seq

EPOCH = "0123456789abcdef"
HASHES = bytes(range(16))

STORED = ReportStored(HASHES, 1, "CPU", 16, [(16, 2)], 2**64 - 1, "mamba", 128, "fs", "REMOTE", "lora")
REMOVED = ReportRemoved(HASHES, None, "GPU", "fs", "LOCAL")
CLEARED = ReportCleared("GPU", "sleep", "fs")
PLACE = PlaceSummary(1, "CPU", 2, 3, 2**64 - 1, "fs", "REMOTE")
CATALOG = DeclaredCatalog(
    [DeclaredGroup(0, "sliding_window", 16, 128, 64, True, False, 1)],
    16,
    32,
    64,
    True,
    4096,
    "sha256_cbor",
    "00ff",
    HashExample([1, 2], 2**64 - 1),
    1,
    2,
    "plain",
    4,
    {"a": "/a"},
    "m",
    1,
    8192,
    1000,
    2,
    2,
    "c",
    "0.32.0",
    ["c", "d"],
    True,
    engine="sglang",
    peer=PeerAddress("*", 6001, "5d1f", 1, 4096),
)

REPORTS: list[Any] = [
    Events(EPOCH, 1.0, 2.0, [STORED, REMOVED, CLEARED], 1, 5, 3),
    Heartbeat(EPOCH, 1.0, 2.0, 1.0, [PLACE], 3, 4, ["CPU"], "all failed", "tiers failed"),
    CatalogMessage(EPOCH, 1.0, 2, CATALOG),
]
ANSWERS: list[Any] = [
    Hello(7, EPOCH, 1.0, 9, "tcp://*:1", 1.0, 2, "0.1", 3, CATALOG, {"catalog": "on"}, "all failed"),
    SnapshotPart(7, EPOCH, 1.0, 9, 3, HASHES, 1, "CPU", "fs", "REMOTE", [(1, 2)], True, [PLACE]),
    Refused(7, "busy", 1.0),
]

# Every message with its required fields alone, and the map that encodes it.
MINIMAL: list[tuple[Any, dict[str, Any]]] = [
    (
        Events(EPOCH, 1.0, 2.0, [ReportStored(b"", None, "GPU"), ReportRemoved(b"", 0, "GPU"), ReportCleared("GPU")]),
        {
            "type": "events",
            "epoch": EPOCH,
            "started_s": 1.0,
            "ts": 2.0,
            "events": [
                {"type": "stored", "hashes": b"", "group_idx": None, "medium": "GPU"},
                {"type": "removed", "hashes": b"", "group_idx": 0, "medium": "GPU"},
                {"type": "cleared", "medium": "GPU"},
            ],
        },
    ),
    (
        Heartbeat(EPOCH, 1.0, 2.0, 1.0, [PlaceSummary(0, "GPU", 0, 0, 0)]),
        {
            "type": "heartbeat",
            "epoch": EPOCH,
            "started_s": 1.0,
            "ts": 2.0,
            "interval_s": 1.0,
            "places": [{"group_idx": 0, "medium": "GPU", "blocks": 0, "copies": 0, "digest": 0}],
        },
    ),
    (
        CatalogMessage(EPOCH, 1.0, 2, DeclaredCatalog([DeclaredGroup(0, "full_attention", 16)])),
        {
            "type": "catalog",
            "epoch": EPOCH,
            "started_s": 1.0,
            "version": 2,
            "catalog": {"groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 16}]},
        },
    ),
    (
        Hello(7, EPOCH, 1.0, 9, "tcp://*:1", 1.0),
        {
            "type": "hello",
            "id": 7,
            "epoch": EPOCH,
            "started_s": 1.0,
            "next_seq": 9,
            "reports": "tcp://*:1",
            "heartbeat_s": 1.0,
        },
    ),
    (
        SnapshotPart(7, EPOCH, 1.0, 9, 0),
        {"type": "snapshot", "id": 7, "epoch": EPOCH, "started_s": 1.0, "next_seq": 9, "index": 0},
    ),
    (Refused(7, "busy"), {"type": "refused", "id": 7, "reason": "busy"}),
    (HelloRequest(), {"type": "hello"}),
    (SnapshotRequest(), {"type": "snapshot"}),
]


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def plain(message: Any) -> Any:
    """Return the message as plain values, because some structs compare by identity."""
    return msgspec.msgpack.decode(encode(message))


@pytest.mark.parametrize("message", REPORTS, ids=lambda message: type(message).__name__)
def test_reports_survive_a_round_trip_with_every_field(message: Any) -> None:
    back = read_report(encode(message))
    assert type(back) is type(message)
    assert plain(back) == plain(message)


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: type(message).__name__)
def test_answers_survive_a_round_trip_with_every_field(message: Any) -> None:
    back = read_answer([b"", encode(message)])
    assert type(back) is type(message)
    assert plain(back) == plain(message)


@pytest.mark.parametrize("message", [HelloRequest(3), SnapshotRequest(3)])
def test_requests_survive_a_round_trip(message: Any) -> None:
    assert msgspec.msgpack.decode(encode(message), type=Request) == message


@pytest.mark.parametrize("full", [*REPORTS, *ANSWERS, STORED, REMOVED, CLEARED, PLACE, CATALOG, CATALOG.groups[0]])
def test_the_round_trips_leave_no_field_out(full: Any) -> None:
    # Fields at their default are not written, so a default value above would leave its field untested.
    written = plain(full)
    assert [field.encode_name for field in msgspec.structs.fields(full) if field.encode_name not in written] == []


@pytest.mark.parametrize(("message", "written"), MINIMAL, ids=lambda value: type(value).__name__)
def test_defaults_are_left_out(message: Any, written: dict[str, Any]) -> None:
    assert plain(message) == written


def widened(value: Any) -> Any:
    """Return the value with an unknown field in every map that has a fixed set of fields."""
    if isinstance(value, dict):
        inner = {
            key: inner_value if key in ("lora_paths", "features") else widened(inner_value)
            for key, inner_value in value.items()
        }
        return inner | {"later": {"x": [1, None]}}
    if isinstance(value, list):
        return [widened(item) for item in value]
    return value


@pytest.mark.parametrize("message", [*REPORTS, *ANSWERS], ids=lambda message: type(message).__name__)
def test_unknown_fields_are_skipped(message: Any) -> None:
    payload = encode(widened(plain(message)))
    back = read_answer([b"", payload]) if message in ANSWERS else read_report(payload)
    assert plain(back) == plain(message)


@pytest.mark.parametrize("payload", [{"type": "later"}, {"type": "later", "epoch": 5}, {"type": "hello2", "id": []}])
def test_unknown_types_are_skipped(payload: dict[str, Any]) -> None:
    for back in (read_report(encode(payload)), read_answer([b"", encode(payload)])):
        assert back is None


EVENTS = plain(REPORTS[0])
PART = plain(ANSWERS[1])


@pytest.mark.parametrize(
    ("payload", "uses_seq", "epoch"),
    [
        (b"", False, None),
        (b"\xc1", False, None),
        (b"\x91" * 5_000, False, None),
        (encode([1, 2]), False, None),
        (encode({"type": 3}), False, None),
        (encode(EVENTS)[:-1], False, None),
        (encode(EVENTS) + b"\x00", False, None),
        (encode(EVENTS | {"events": 1}), True, EPOCH),
        (encode(EVENTS | {"events": [{"type": "later"}]}), True, EPOCH),
        (encode(EVENTS | {"events": [{"type": "x" * 10_000}]}), True, EPOCH),
        # The skipped field is nested too deep to skip.
        (b"\x82" + encode("type") + encode("events") + encode("later") + b"\x91" * 100_000 + b"\xc0", False, None),
        (encode(EVENTS | {"epoch": None}), True, None),
        (encode(EVENTS | {"epoch": ""}), True, None),
        (encode(EVENTS | {"epoch": "x" * (MAX_EPOCH_CHARS + 1)}), True, None),
        (encode(EVENTS | {"events": 1, "epoch": "x" * (MAX_EPOCH_CHARS + 1)}), True, None),
        (encode(EVENTS | {"events": [plain(STORED) | {"hashes": b"123"}]}), True, EPOCH),
        (encode(EVENTS | {"events": [plain(REMOVED) | {"hashes": b"123456789"}]}), True, EPOCH),
        (encode(EVENTS | {"events": [plain(STORED) | {"parent_hash": "x" * 10_000}]}), True, EPOCH),
        (encode(plain(REPORTS[1]) | {"places": 3}), False, EPOCH),
        (encode(plain(REPORTS[2]) | {"catalog": None}), False, EPOCH),
    ],
)
def test_a_damaged_report_keeps_its_epoch_and_seq_where_legible(
    payload: bytes, uses_seq: bool, epoch: str | None
) -> None:
    back = read_report(payload)
    assert isinstance(back, Unreadable)
    assert (back.uses_seq, back.epoch) == (uses_seq, epoch)
    assert 0 < len(back.reason) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [encode(PART)],
        [b"x", encode(PART)],
        [b"", encode(PART), b""],
        [b"", b"\xc1"],
        [b"", encode(PART | {"next_seq": -1})],
        [b"", encode(PART | {"next_seq": 2**63})],
        [b"", encode(PART | {"index": 2**64 - 1, "copied": [1]})],
        [b"", encode(PART | {"epoch": ""})],
        [b"", encode(plain(ANSWERS[0]) | {"next_seq": 2**63})],
        [b"", encode(plain(ANSWERS[0]) | {"reports": None})],
        [b"", encode({"type": "refused"})],
    ],
)
def test_damaged_answers_are_unreadable(frames: list[bytes]) -> None:
    assert isinstance(read_answer(frames), Unreadable)


def test_a_seq_is_8_bytes_without_the_top_bit() -> None:
    assert read_seq((2**63 - 1).to_bytes(8, "big")) == 2**63 - 1
    assert read_seq((2**63).to_bytes(8, "big")) is None
    assert read_seq(bytes(7)) is None
    assert read_seq(bytes(9)) is None


def test_packed_hashes_are_big_endian() -> None:
    numbers = [1, 2**64 - 1]
    assert pack_hashes(numbers) == bytes(7) + b"\x01" + b"\xff" * 8
    assert pack_hashes(np.array(numbers, np.uint64)) == pack_hashes(numbers)
    back = unpack_hashes(pack_hashes(numbers))
    assert back.dtype == np.uint64 and back.dtype.isnative
    assert back.tolist() == numbers
    with pytest.raises(ValueError, match="7 bytes"):
        unpack_hashes(bytes(7))


@pytest.mark.parametrize(
    ("events", "requests", "reports"),
    [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:15557", "tcp://10.0.0.1:16557"),
        ("tcp://*:5557", "tcp://*:15557", "tcp://*:16557"),
        ("tcp://[::1]:5557", "tcp://[::1]:15557", "tcp://[::1]:16557"),
        ("tcp://h:55535", "tcp://h:65535", "tcp://h:44535"),
        ("tcp://h:55536", "tcp://h:45536", "tcp://h:44536"),
        ("tcp://h:65535", "tcp://h:55535", "tcp://h:54535"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv.kvrouter-requests", "ipc:///tmp/kv.kvrouter-reports"),
        ("inproc://kv", "inproc://kv.kvrouter-requests", "inproc://kv.kvrouter-reports"),
        ("tcp://h:0", None, None),
        ("tcp://h:65536", None, None),
        ("tcp://h:*", None, None),
        ("tcp://h", None, None),
        ("udp://h:5557", None, None),
        ("", None, None),
    ],
)
def test_the_patchs_endpoints_are_derived_from_the_engines(
    events: str, requests: str | None, reports: str | None
) -> None:
    assert requests_endpoint(events) == requests
    assert reports_endpoint(events) == reports


@pytest.mark.parametrize(
    ("said", "asked", "where"),
    [
        ("tcp://*:7", "tcp://h:6", "tcp://h:7"),
        ("tcp://0.0.0.0:7", "tcp://h:6", "tcp://h:7"),
        ("tcp://[::]:7", "tcp://[fe80::1]:6", "tcp://[fe80::1]:7"),
        ("tcp://127.0.0.1:7", "tcp://h:6", "tcp://127.0.0.1:7"),
        ("ipc:///run/r", "ipc:///run/q", "ipc:///run/r"),
        ("inproc://r", "inproc://q", "inproc://r"),
        ("tcp://h:65535", "tcp://h:6", "tcp://h:65535"),
        ("tcp://h:65536", "tcp://h:6", None),
        ("tcp://h:0", "tcp://h:6", None),
        ("tcp://h:*", "tcp://h:6", None),
        ("tcp://h:\u0667", "tcp://h:6", None),
        ("tcp://h:" + "9" * 5_000, "tcp://h:6", None),
        ("tcp://:7", "tcp://h:6", None),
        ("tcp://h", "tcp://h:6", None),
        ("tcp://h\0:7", "tcp://h:6", None),
        ("ipc:///etc/x", "tcp://h:6", None),
        ("inproc://", "inproc://q", None),
        ("", "tcp://h:6", None),
    ],
)
def test_a_wildcard_in_a_hello_is_replaced_and_other_transports_are_refused(
    said: str, asked: str, where: str | None
) -> None:
    assert reachable(said, asked) == where
