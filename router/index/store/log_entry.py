# SPDX-License-Identifier: Apache-2.0
"""One entry of a worker's log: the changes of one commit, so that a mirror can repeat them. Pure.

Fields of the stream entry: `kind` (commit, epoch, note), `commit` (its number, rising by one with each entry of the
worker), `epoch`, `first`, `last` (seq range; of a commit only), `changes` and `meta` (msgpack; absent when empty).
`changes` is a list of [place text, added hashes, removed hashes], with each hash packed as 8 bytes, big-endian. The
last field, `sum`, is the checksum of the log's key and of all fields before it, so that an entry that was damaged in
the store is rejected.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from kvrouter.router.base.common.checksum import checksum
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.resp import hashes_from_bytes, hashes_to_bytes
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys


class EntryKind(Enum):
    """The kind of a log entry."""

    COMMIT = b"commit"  # changes on top of what was there
    EPOCH = b"epoch"  # a new epoch: drop everything
    NOTE = b"note"  # only meta changed


class LogEntry(msgspec.Struct, frozen=True):
    """One entry, as read."""

    worker: WorkerKey
    # The stream's id of the entry.
    id: str
    # The number of the entry.
    commit: int
    epoch: str
    # The seqs are None for all kinds but commits.
    first_seq: int | None
    last_seq: int | None
    opened_epoch: bool
    changes: list[ResidencyDelta]
    meta: dict[str, bytes]
    # Whether it may have been in the log for long, because the log had not been read to its end before.
    is_backlog: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_changes = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]]).decode
_decode_meta = msgspec.msgpack.Decoder(dict[str, bytes]).decode


def encode_text(text: str) -> bytes:
    """Encode text that may hold lone surrogates, because epochs come from the wire."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Decode text that `encode_text` encoded. Raises ValueError."""
    return data.decode("utf-8", "surrogatepass")


_SUM = b"sum"


def entry_fields(
    worker: WorkerKey,
    kind: EntryKind,
    commit: int,
    epoch: str,
    seqs: tuple[int, int] | None = None,
    changes: list[ResidencyDelta] | None = None,
    meta: dict[str, bytes] | None = None,
) -> list[bytes]:
    """Return the names and values of the entry's fields in turn, as XADD takes them."""
    fields = [b"kind", kind.value, b"commit", b"%d" % commit, b"epoch", encode_text(epoch)]
    if seqs is not None:
        fields += [b"first", b"%d" % seqs[0], b"last", b"%d" % seqs[1]]
    packed = [
        (keys.place_text(change.place), hashes_to_bytes(change.added), hashes_to_bytes(change.removed))
        for change in changes or ()
        if len(change.added) or len(change.removed)
    ]
    if packed:
        fields += [b"changes", _encode(packed)]
    if meta:
        fields += [b"meta", _encode(meta)]
    return [*fields, _SUM, _checksum(worker, fields)]


def _checksum(worker: WorkerKey, fields: list[bytes]) -> bytes:
    return checksum(keys.log(worker).encode(), *fields)


def parse_entry(worker: WorkerKey, entry_id: bytes, fields: list[bytes]) -> LogEntry:
    """Parse an entry as XREAD returned it.

    Raises ValueError, KeyError or msgspec.MsgspecError for an entry that no router writes.
    """
    if fields[-2:] != [_SUM, _checksum(worker, fields[:-2])]:
        raise ValueError("its checksum is wrong: it was changed where it is stored")
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    kind = EntryKind(values[b"kind"])
    first, last = values.get(b"first"), values.get(b"last")
    changes = _decode_changes(values[b"changes"]) if b"changes" in values else []
    return LogEntry(
        worker=worker,
        id=entry_id.decode("ascii"),
        commit=keys.parse_number(values[b"commit"]),
        epoch=decode_text(values[b"epoch"]),
        first_seq=None if first is None else keys.parse_number(first),
        last_seq=None if last is None else keys.parse_number(last),
        opened_epoch=kind is EntryKind.EPOCH,
        changes=[
            ResidencyDelta(keys.parse_place(place), hashes_from_bytes(added), hashes_from_bytes(removed))
            for place, added, removed in changes
        ],
        meta=_decode_meta(values[b"meta"]) if b"meta" in values else {},
    )
