# SPDX-License-Identifier: Apache-2.0
"""Truth of docs/reference/protocol.md, its fields, and of protocol-examples.md, its examples and its reader."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvrouter.engine_patch.reporter import reporter as reporter_module
from kvrouter.engine_patch.reporter.ledger import Ledger
from kvrouter.engine_patch.reporter.request_handler import MAX_UNSENT
from kvrouter.engine_patch.reporter.snapshots import Moment, parts
from kvrouter.engine_patch.setup.settings import DEFAULT_MAX_BLOCKS, ReporterSettings
from kvrouter.events.patch import messages as report
from tests.golden.make_report_messages import CASES, message, plain
from tests.support.report_peer import TIMEOUT_MS, eventually, fails, removed, said, start, stored

TESTS = Path(__file__).resolve().parents[1]

REFERENCE = TESTS.parent / "docs" / "reference"
PAGE = (REFERENCE / "protocol.md").read_text()
EXAMPLES_PAGE = (REFERENCE / "protocol-examples.md").read_text()
EXAMPLES = {case["name"]: case for case in json.loads(CASES.read_text())}

# Each table's heading on the page, with its struct.
TABLES = {
    "### `events`": report.Events,
    "#### `stored`": report.ReportStored,
    "#### `removed`": report.ReportRemoved,
    "#### `cleared`": report.ReportCleared,
    "### `heartbeat`": report.Heartbeat,
    "#### `PlaceSummary`": report.PlaceSummary,
    "### `catalog`": report.CatalogMessage,
    "#### `DeclaredCatalog`": report.DeclaredCatalog,
    "#### `DeclaredGroup`": report.DeclaredGroup,
    "#### `PeerAddress`": report.PeerAddress,
    "#### `HashExample`": report.HashExample,
    "### request `hello`": report.HelloRequest,
    "### request `snapshot`": report.SnapshotRequest,
    "### reply `hello`": report.Hello,
    "### reply `snapshot`": report.SnapshotPart,
    "### reply `refused`": report.Refused,
}


def blocks(language: str, name: str) -> list[str]:
    """Return the fenced blocks of the examples' page of a language, with `name` in their first line."""
    return re.findall(rf"^```{language} {name}$\n(.*?)^```$", EXAMPLES_PAGE, re.MULTILINE | re.DOTALL)


def title(name: str) -> str:
    return f"example={name.replace(',', '').replace(' ', '-')}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_the_code_encodes_and_what_the_page_shows(name: str) -> None:
    case = EXAMPLES[name]
    payload = bytes.fromhex(case["payload"])
    assert msgspec.msgpack.encode(message(case)) == payload
    assert msgspec.msgpack.decode(payload) == plain(case["message"])
    (example,), (hexed,) = blocks("json", title(name)), blocks("text", title(name))
    assert json.loads(example) == case["message"]
    assert bytes.fromhex(hexed) == payload
    frames = EXAMPLES_PAGE[: EXAMPLES_PAGE.index(hexed)].rsplit("Frames:", 1)[1]
    first = f"`{report.REPORT_TOPIC.decode()}`, seq `{case['seq']:016x}`" if case["side"] == "report" else "empty"
    assert frames.startswith(f" {first}, payload:\n")


def test_the_page_has_exactly_these_examples() -> None:
    assert re.findall(r"^```json (.*)$", EXAMPLES_PAGE, re.MULTILINE) == [title(name) for name in EXAMPLES]
    assert {case["side"] for case in EXAMPLES.values()} == {"report", "request", "reply"}


def test_every_field_is_in_some_example() -> None:
    fields: set[tuple[type, str]] = set()

    def walk(value: Any, given: Any) -> None:
        if isinstance(value, msgspec.Struct):
            for name in given:
                if name != "type":
                    fields.add((type(value), name))
                    walk(getattr(value, name), given[name])
        elif isinstance(value, list | tuple):
            for item, item_given in zip(value, given, strict=True):
                walk(item, item_given)

    for case in EXAMPLES.values():
        walk(message(case), case["message"])
    # Messages omit `protocol` at its default, which is its only value so far.
    fields.add((report.Hello, "protocol"))
    missing = [
        f"{struct.__name__}.{name}"
        for struct in TABLES.values()
        for name in struct.__struct_fields__
        if (struct, name) not in fields
    ]
    assert not missing


def type_text(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.UnionType(types=union):
            named = [type_text(member) for member in union if not isinstance(member, msgspec.inspect.NoneType)]
            return " or ".join(named + ["nil"] * (len(named) < len(union)))
        case msgspec.inspect.ListType(item_type=item):
            return f"array of {type_text(item)}"
        case msgspec.inspect.TupleType(item_types=items):
            return f"[{', '.join(map(type_text, items))}]"
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return f"map of {type_text(key)} to {type_text(value)}"
        case msgspec.inspect.StructType(cls=struct, tag=tag):
            return f"`{tag or struct.__name__}`"
        case _:
            return {"IntType": "int", "FloatType": "float", "StrType": "str", "BoolType": "bool", "BytesType": "bin"}[
                type(kind).__name__
            ]


def default_text(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "required"
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if default is None:
        return "nil"
    return "empty" if default in ("", b"", [], {}) else f"`{json.dumps(default)}`"


@pytest.mark.parametrize("heading", TABLES)
def test_a_table_has_all_fields_with_type_and_default(heading: str) -> None:
    section = PAGE.partition(f"\n{heading}\n")[2]
    rows = section[section.index("| field |") :].partition("\n\n")[0].splitlines()[2:]
    cells = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    info = msgspec.inspect.type_info(TABLES[heading])
    assert isinstance(info, msgspec.inspect.StructType)
    expected = [(f"`{field.name}`", type_text(field.type), default_text(field)) for field in info.fields]
    assert [row[:3] for row in cells] == expected
    assert all(len(row) == 4 and row[3] for row in cells)


def test_every_struct_of_the_protocol_has_a_table() -> None:
    structs = {
        item
        for item in vars(report).values()
        if isinstance(item, type) and issubclass(item, msgspec.Struct) and item.__module__ == report.__name__
    }
    assert structs == set(TABLES.values())


def test_the_examples_tell_one_story() -> None:
    ledger = Ledger(1_000)
    events = message(EXAMPLES["events"])
    ledger.report(events.events)
    assert ledger.places() == message(EXAMPLES["heartbeat"]).places
    digest = ledger.places()[0].digest
    assert f"{digest:016x} = {digest}" in EXAMPLES_PAGE
    next_seq = EXAMPLES["events"]["seq"] + 1
    assert {EXAMPLES[name]["seq"] for name in ("heartbeat", "catalog")} == {next_seq}
    moment = Moment(events.epoch, events.started_s, next_seq, ledger.freeze())
    payloads = [case["payload"] for name, case in EXAMPLES.items() if name.startswith("snapshot, ")]
    assert [msgspec.msgpack.encode(part).hex() for part in parts(moment, 2)] == payloads


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    settings = ReporterSettings()
    for text in (
        f"port + {report.REQUESTS_PORT_OFFSET:,}; ",
        f"port + {report.REPORTS_PORT_OFFSET:,}; ",
        f"over {report.MAX_PORT:,}",
        f"version {report.PROTOCOL}\n",
        f"topic `{report.REPORT_TOPIC.decode()}`",
        f"at most {report.SNAPSHOT_PART_BLOCKS:,} hashes",
        f"| {reporter_module.MAX_MESSAGE_BYTES:,} bytes;",
        f"| {settings.max_snapshots}; others are `refused` with `retry_s` {settings.retry_s} |",
        f"({settings.reply_hwm} parts)",
        f"after {settings.snapshot_timeout_s:.0f} s without progress",
        f"| {MAX_UNSENT} of all clients wait, for {settings.snapshot_timeout_s:.0f} s |",
        f"| {settings.report_hwm:,} messages, then ZMQ drops",
        f"| {settings.max_queue_size:,}; then they are dropped",
        f"| {settings.max_dropped_bytes >> 20} MiB; beyond it",
        f"| {DEFAULT_MAX_BLOCKS:,} (`KVROUTER_PATCH_MAX_BLOCKS`)",
    ):
        assert text in PAGE, text
    events = "tcp://h:5557"
    assert (report.requests_endpoint(events), report.reports_endpoint(events)) == ("tcp://h:15557", "tcp://h:16557")
    for endpoint in (report.requests_endpoint("ipc://x"), report.reports_endpoint("ipc://x")):
        assert endpoint is not None
        assert f"`{endpoint.removeprefix('ipc://x')}` appended" in PAGE


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[tuple[int, Counter[Any], bool]]]:
    """Return the page's reader, with msgspec in the place of msgpack: both read and write the same format."""
    msgpack = types.ModuleType("msgpack")
    msgpack.packb, msgpack.unpackb = msgspec.msgpack.encode, msgspec.msgpack.decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msgpack", msgpack)
    (source,) = blocks("python", "reader")
    names: dict[str, Any] = {}
    exec(compile(source, "docs/reference/protocol-examples.md", "exec"), names)  # noqa: S102
    reader: Callable[..., Iterator[tuple[int, Counter[Any], bool]]] = names["follow"]
    return reader


def test_the_reader_of_the_page_follows_a_reporter(
    follow: Callable[..., Iterator[tuple[int, Counter[Any], bool]]],
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    context.setsockopt(zmq.LINGER, 0)
    reporter = start(context, heartbeat_s=0.01, max_queue_size=20)
    gpu, cpu = (0, "GPU", None, None), (1, "CPU", "a", None)

    def proven(reading: Iterator[tuple[int, Counter[Any], bool]], expected: dict[Any, int]) -> None:
        for _, copies, is_proven in reading:
            if is_proven and +copies == expected:
                return

    # The reader joins late.
    reporter.publish(said(stored([1, 2, 2, 2**64 - 1]), stored([7], "CPU", 1, ownership="a")), 0)
    eventually(lambda: reporter.counters.sent == 1)
    reading = follow(context, reporter.requests_endpoint)
    copies_at_start = {(gpu, 1): 1, (gpu, 2): 2, (gpu, 2**64 - 1): 1, (cpu, 7): 1}
    proven(reading, copies_at_start)
    reporter.publish(said(removed([2, 2, 1, 99]), stored([2, 3]), stored([7], "CPU", 1, ownership="a")), 1)
    proven(reading, {(gpu, 2): 1, (gpu, 3): 1, (gpu, 2**64 - 1): 1, (cpu, 7): 2})
    reporter.publish(said(report.ReportCleared("CPU", ownership="b"), report.ReportCleared("GPU")), 2)
    proven(reading, {(cpu, 7): 2})
    # The reporter drops messages.
    released = threading.Event()
    reporter.publish(lambda: [] if released.wait(TIMEOUT_MS / 1_000) else fails(), 3)
    for number in range(50):
        reporter.publish(said(stored([number])), 4 + number)
    released.set()
    proven(reading, {(cpu, 7): 2} | {(gpu, number): 1 for number in range(50)})
    assert reporter.counters.dropped > 0
    # The publisher loses its ledger.
    reporter.publish(fails, None)
    reporter.publish(said(removed([5]), stored([5, 6])), None)
    proven(reading, {(gpu, 5): 1, (gpu, 6): 1})
    reporter.close()
    context.destroy(linger=0)
