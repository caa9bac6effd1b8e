# SPDX-License-Identifier: Apache-2.0
"""Reading of one worker's stored state: its checkpoint and the log after it in one MULTI, checked value by value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import LogTail, apply_changes, parse_residents
from kvrouter.router.index.store.commit import NO_LOG_ID, Head, WorkerImage, parse_copies_value
from kvrouter.router.index.store.log_entry import LogEntry, decode_text, parse_entry
from kvrouter.router.index.store.transactions import Transactions, multi, pairs

# 10^6 hashes are 8 MB, and a few milliseconds of the server's one thread; several routers may load at once, over slow
# lines.
LOAD_TIMEOUT_S = 60.0
# How often an image is read again because its epoch or its places changed meanwhile, both of which are rare.
LOAD_ATTEMPTS = 16
# Entries that may be written between the look at `meta` and the reading of the log.
SPARE_ENTRIES = 64
# The copies of a block are counted in 16 bits (copy_counts.py), and stored from 2 on.
_COPIES_MIN, _COPIES_MAX = 2, 2**16 - 1

_FIELDS = [name for name in keys.META_FIELDS if name != keys.META_UNREADABLE]

_Entries = list[tuple[bytes, list[bytes]]]


async def load_image(transactions: Transactions, worker: WorkerKey) -> WorkerImage:
    """Return the stored state of `worker`, as `IndexStore.load` describes it."""
    meta_key, log_key = keys.meta(worker), keys.log(worker)

    async def read(connection: Connection) -> WorkerImage:
        # Begin with the `meta` of a new worker, which is empty. For any other worker, the first round only reads its
        # real `meta`, which shows which keys the next round must read.
        head = Head.of(meta_key, *[None] * len(_FIELDS))
        for _ in range(LOAD_ATTEMPTS):
            stored = [keys.residents(worker, head.epoch or "", keys.parse_place(text)) for text in head.places]
            count = head.commits - head.checkpoint + SPARE_ENTRIES
            orders = [
                command("HGETALL", meta_key),
                command("XREVRANGE", log_key, "+", "-", "COUNT", count),
                *(command("GET", key) for key in stored),
            ]
            *_, replies = await connection.run(multi(orders), len(orders) + 2, LOAD_TIMEOUT_S)
            for key, reply in zip((meta_key, log_key, *stored), replies, strict=True):
                if isinstance(reply, Exception):
                    raise StoredValueError(key, "", reply)
            all_fields, newest, *values = replies
            meta = _meta_of(meta_key, all_fields)
            meta.pop(keys.META_UNREADABLE, None)
            previous, head = head, _readable(Head.of(meta_key, *(meta.pop(name, None) for name in _FIELDS)))
            if (head.epoch, [*head.places]) != (
                previous.epoch,
                [*previous.places],
            ) or head.commits - head.checkpoint > count:
                continue
            base = {
                keys.parse_place(text): parse_residents(key, value, place)
                for (text, place), key, value in zip(head.places.items(), stored, values, strict=True)
            }
            entries, tail = _tail_of(worker, head, newest), LogTail()
            for entry in entries:
                tail.add(entry.changes)
            return WorkerImage(
                worker=worker,
                epoch=head.epoch,
                seq=head.seq,
                meta=meta,
                log_id=newest[0][0].decode("ascii") if newest else NO_LOG_ID,
                commits=head.commits,
                places=apply_changes(base, (change for entry in entries for change in entry.changes)),
                tail_entries=tail.entries,
                tail_blocks=tail.blocks,
            )
        raise StoreUnavailable(
            f"{meta_key} kept changing its epoch or places while it was read: more than one router may write it"
        )

    return await transactions.read(meta_key, read, "a key of its worker")


def _tail_of(worker: WorkerKey, head: Head, newest: _Entries) -> list[LogEntry]:
    """Return the log entries after the checkpoint, in order. Raises StoredValueError if one is missing.

    Entries of other programs are skipped, as the numbers show that none of ours is missing.

    Args:
        worker: The worker.
        head: The head of its `meta`.
        newest: The last entries of the log, from the end.
    """
    wanted = range(head.checkpoint + 1, head.commits + 1)
    entries: list[LogEntry] = []
    for entry_id, fields in newest:
        if len(entries) == len(wanted):
            break
        with contextlib.suppress(ValueError, KeyError, msgspec.MsgspecError):
            entries.append(parse_entry(worker, entry_id, fields))
    entries.reverse()
    numbers = [entry.commit for entry in entries]
    whole = len(numbers) == len(wanted) and all(number == due for number, due in zip(numbers, wanted, strict=True))
    if not whole or any(entry.epoch != head.epoch or entry.opened_epoch for entry in entries):
        shown = f"{len(numbers)} entries from {min(numbers, default=None)} on: expected {len(wanted)} from {wanted.start} on"
        raise StoredValueError(keys.log(worker), "the end", shown)
    return entries


async def load_copies(transactions: Transactions, worker: WorkerKey) -> dict[tuple[Place, int], int]:
    """Return the stored numbers of copies of `worker`, as `IndexStore.load_copies` describes them."""
    meta_key = keys.meta(worker)

    async def read(connection: Connection) -> dict[tuple[Place, int], int]:
        head = await _read_head(connection, meta_key)
        while head.epoch is not None:
            key, before = keys.copies(worker, head.epoch), head
            (fields,) = await connection.run(command("HGETALL", key), 1, LOAD_TIMEOUT_S)
            copies = dict(_copies_of(key, fields))
            if copies.pop(keys.COPIES_MARK, None) is not None or not head.has_mark:
                return copies
            # A new epoch deletes the copies of the one before it.
            head = await _read_head(connection, meta_key)
            if head.epoch == before.epoch:
                raise StoredValueError(key, "", f"{len(copies)} numbers of copies without their mark: some were lost")
        return {}

    return await transactions.read(meta_key, read, "a key of its worker")


async def _read_head(connection: Connection, meta_key: str) -> Head:
    """Read the fields of `meta` that a write must know. Raises StoredValueError.

    The note of another router that could not read the worker is left out, because this router may be able to.
    """
    (fields,) = await connection.run(command("HMGET", meta_key, *_FIELDS), 1)
    return _readable(Head.of(meta_key, *fields))


def _readable(head: Head) -> Head:
    """Return the head, or raise the error that was met when its fields were read."""
    if head.problem is not None:
        raise head.problem
    return head


def _meta_of(key: str, fields: list[bytes]) -> dict[str, bytes]:
    try:
        return {decode_text(field): value for field, value in pairs(fields)}
    except ValueError:
        raise StoredValueError(
            key, "the name of a field", [name for name in fields[::2] if not name.isascii()]
        ) from None


def _copies_of(key: str, fields: list[bytes]) -> Iterable[tuple[tuple[Place, int], int]]:
    """Yield place and block hash with the number of copies. Raises StoredValueError."""
    for field, value in pairs(fields):
        try:
            count = parse_copies_value(field, value)
            if not _COPIES_MIN <= count <= _COPIES_MAX:
                raise ValueError(f"{count} copies")
            yield keys.parse_copies_field(field), count
        except ValueError:
            raise StoredValueError(key, repr(field), value) from None
