# SPDX-License-Identifier: Apache-2.0
"""The fuzz target for the decoders alone, with one payload in each input.

The payloads are stock batches, reports, answers, and entries of the log in Redis.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvrouter.events.patch.decode import MAX_EPOCH_CHARS, Unreadable, read_answer, read_report
from kvrouter.events.patch.messages import Events, Hello, Refused, ReportCleared
from kvrouter.events.vllm.codec import BatchDecoder, CodecError
from kvrouter.events.vllm.messages import AllBlocksCleared, BlockRemoved, EventBatch
from kvrouter.events.vllm.wire import MAX_SEQ
from kvrouter.router.base.common.checksum import checksum
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.event_runs import EventRun, RunReader
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.log_entry import EntryKind, entry_fields, parse_entry
from tests.fuzz.script import Step, pack, unpack
from tests.support.event_sections import sections

STOCK, STOCK_TOKENS, REPORT, ANSWER, CHANGES, META, KINDS = range(7)

# As in `batch_scan.pyx`.
MAX_JOINED_RUNS = 64
REMOVING = ("BlockRemoved", "AllBlocksCleared")
GOLDEN = Path(__file__).parents[1] / "golden"
WORKER = WorkerKey("m", "w")


def run(data: bytes) -> None:
    """Run the first step of one input; raises AssertionError, or the exception of the code under test."""
    for step in unpack(data)[:1]:
        kind, payload = step.kind % KINDS, step.payload
        if kind in (STOCK, STOCK_TOKENS):
            read_stock(payload, kind == STOCK_TOKENS)
        elif kind == REPORT:
            _report(payload)
        elif kind == ANSWER:
            _answer(payload)
        else:
            _entry(b"changes" if kind == CHANGES else b"meta", payload)


def corpus() -> list[bytes]:
    batches = golden_batches()
    steps = [Step(kind, 0, payload) for kind in (STOCK, STOCK_TOKENS) for payload in batches]
    for vector in golden_reports():
        kind = REPORT if vector["side"] == "report" else ANSWER
        steps.append(Step(kind, 0, bytes.fromhex(vector["payload"])))
    change = ResidencyDelta(Place(1, "GPU", "own er"), np.arange(3, dtype=np.uint64), np.arange(1, dtype=np.uint64))
    fields = entry_fields(WORKER, EntryKind.COMMIT, 1, "e", (0, 1), [change], {"learned": b"{}"})
    steps += [Step(CHANGES, 0, fields[fields.index(b"changes") + 1]), Step(META, 0, fields[fields.index(b"meta") + 1])]
    return [pack([step]) for step in steps]


def golden_batches() -> list[bytes]:
    """Return payloads of batches that vLLM's own encoder made."""
    return [bytes.fromhex(vector["payload"]) for vector in json.loads((GOLDEN / "events_vllm_0_32.json").read_text())]


def golden_reports() -> list[dict[str, Any]]:
    """Return messages of the patch for both of its sockets."""
    vectors: list[dict[str, Any]] = json.loads((GOLDEN / "report_messages.json").read_text())
    return vectors


def read_stock(payload: bytes, with_tokens: bool) -> EventBatch | None:
    """Decode a stock batch in several ways, and return it, or None if the payload is none.

    The result must not depend on the layout of earlier batches, and each event must be read, or counted as broken or
    unknown.
    """
    runs = RunReader().read([payload])
    try:
        batch = BatchDecoder().decode(payload, with_tokens=with_tokens)
    except CodecError:
        assert runs is None
        return None
    other = BatchDecoder()
    other._arrays = True
    again = other.decode(payload, with_tokens=with_tokens)
    assert [_plain(event) for event in batch.events] == [_plain(event) for event in again.events]
    assert (len(batch.broken), batch.unknown) == (len(again.broken), again.unknown)
    lean = BatchDecoder().decode(payload)
    if runs is not None:
        assert (runs.dp_rank, [], 0) == (lean.dp_rank, lean.broken, lean.unknown)
        assert sections(runs.runs) == sections(lean.events)
        joined = RunReader().read([payload, payload])
        assert joined is not None
        is_joined = len(runs.runs) <= MAX_JOINED_RUNS and all(isinstance(run, EventRun) for run in runs.runs)
        assert joined.batches == (2 if is_joined else 1)
        assert sections(joined.runs) == sections(lean.events * joined.batches)
    assert len(lean.events) + len(lean.broken) == len(batch.events) + len(batch.broken)
    try:
        fields = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError):
        # The decoder does not look into skipped fields, so a payload that msgpack refuses may still be a batch.
        return batch
    assert len(fields[1]) == len(batch.events) + len(batch.broken) + batch.unknown, (
        "an event is neither read nor counted"
    )
    removals = sum(_tag(event) in REMOVING for event in fields[1])
    read = sum(isinstance(event, BlockRemoved | AllBlocksCleared) for event in batch.events)
    unreadable = sum(event.tag in (None, *REMOVING) for event in batch.broken)
    assert removals <= read + unreadable, "a removal was neither read nor reported"
    return batch


def _tag(event: Any) -> Any:
    if isinstance(event, dict):
        return event.get("type")
    return event[0] if isinstance(event, list) and event else None


def _plain(event: Any) -> tuple[Any, ...]:
    fields = msgspec.structs.asdict(event)
    for name in ("block_hashes", "token_ids"):
        if fields.get(name) is not None:
            fields[name] = fields[name].tolist()
    # Values are compared as texts, because extra keys may hold a NaN, which is not equal to itself.
    return type(event).__name__, repr(fields)


def _report(payload: bytes) -> None:
    message = read_report(payload)
    if isinstance(message, Unreadable):
        assert message.reason
        assert message.epoch is None or len(message.epoch) <= MAX_EPOCH_CHARS
    elif message is not None:
        assert 0 < len(message.epoch) <= MAX_EPOCH_CHARS
        for event in message.events if isinstance(message, Events) else ():
            assert isinstance(event, ReportCleared) or len(event.hashes) % 8 == 0
    if not isinstance(message, Events) and _type_of(payload) == "events":
        assert isinstance(message, Unreadable)
        assert message.uses_seq, "a seq was used up, and nobody will miss it"


def _answer(payload: bytes) -> None:
    reply = read_answer([b"", payload])
    if reply is not None and not isinstance(reply, Refused | Unreadable):
        assert 0 < len(reply.epoch) <= MAX_EPOCH_CHARS
        assert 0 <= reply.next_seq <= MAX_SEQ
        assert not isinstance(reply, Hello) or isinstance(reply.reports, str)


def _type_of(payload: bytes) -> Any:
    try:
        fields = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError):
        return None
    # A map with other keys than strings is no message of the patch, whatever its type is.
    return fields.get("type") if isinstance(fields, dict) and all(isinstance(key, str) for key in fields) else None


def _entry(name: bytes, value: bytes) -> None:
    """Parse an entry of the log as the follower does, with a field that another program may have written."""
    fields = [b"kind", b"commit", b"commit", b"1", b"epoch", b"e", b"first", b"0", b"last", b"1", name, value]
    # The checksum is correct, so that the fields behind it are parsed too.
    fields += [b"sum", checksum(keys.log(WORKER).encode(), *fields)]
    try:
        entry = parse_entry(WORKER, b"1-1", fields)
    except (ValueError, KeyError, msgspec.MsgspecError):
        return
    for change in entry.changes:
        assert change.added.dtype == change.removed.dtype == np.uint64
