# SPDX-License-Identifier: Apache-2.0
"""The form of a commit, the conditions under which it applies, and the Redis commands that it becomes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

import msgspec

from kvrouter.router.base.common.checksum import checksum
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.base.redis_client.resp import Hashes, command
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import StoredPlace, parse_places
from kvrouter.router.index.store.log_entry import decode_text, encode_text

T = TypeVar("T")

# More entries after a checkpoint than any log has: some thousand are usual, and the largest log has millions.
MAX_TAIL_ENTRIES = 2**32

# The position before the first entry of every log.
NO_LOG_ID = "0-0"


class Commit(msgspec.Struct, frozen=True):
    """The effect of the batches first_seq..last_seq of one worker's epoch."""

    worker: WorkerKey
    epoch: str
    first_seq: int
    last_seq: int
    changes: list[ResidencyDelta] = []
    # (place, block hash, number of the block's copies there). The store keeps only numbers of 2 or more; a lower one
    # deletes the stored number.
    copies: list[tuple[Place, int, int]] = []
    # Further fields of `meta` to set, none of `keys.META_FIELDS`.
    meta: dict[str, bytes] = {}
    # Whether the epoch may have no commit yet, as far as the writer knows.
    may_be_first: bool = True


class LeaseValue(msgspec.Struct, frozen=True):
    """One acquisition of a worker's lease.

    `number` is a fencing token: no two acquisitions by one process have the same number, even if the store lost its
    data in between, and no later acquisition has a lower number.
    """

    # The router process that acquired the lease.
    token: str
    number: int

    @property
    def value(self) -> bytes:
        """The lease in its stored form."""
        return f"{self.token}:{self.number}".encode()

    @staticmethod
    def token_of(value: bytes) -> str | None:
        """Return the token of the lease's holder. A value that no router writes has no holder: return None."""
        token, _, number = value.rpartition(b":")
        try:
            keys.parse_number(number)
            return token.decode() or None
        except ValueError:
            return None


class CommitOutcome(Enum):
    """The result of a write: APPLIED changed the store, every other outcome left it unchanged."""

    APPLIED = "applied"
    # The lease expired, or another router has taken it since.
    FENCED = "fenced"
    # Another epoch is current, or the seqs do not continue the committed ones: they were replayed, or the store lost
    # its last second in a crash. `IndexStore.load` shows where the store is. A commit that is sent again because its
    # connection was lost is STALE if the first one had been applied.
    STALE = "stale"


class WorkerImage(msgspec.Struct, frozen=True):
    """The state of one worker in the store. Following the log from (log_id, commits) continues this image."""

    worker: WorkerKey
    # The current epoch, None if no epoch was ever opened.
    epoch: str | None
    # The last seq that was committed in this epoch, None if none was.
    seq: int | None
    meta: dict[str, bytes]
    # The id and the number of the last log entry that is part of the image.
    log_id: str
    commits: int
    places: dict[Place, Hashes]
    # The entries and transitions that were read from the log, behind the checkpoint.
    tail_entries: int = 0
    tail_blocks: int = 0

    @classmethod
    def empty(cls, worker: WorkerKey) -> WorkerImage:
        """Return the image of a worker of which nothing is known."""
        return cls(worker, None, None, {}, NO_LOG_ID, 0, {})


class Head(msgspec.Struct, frozen=True):
    """The fields of a worker's `meta` that a transaction must know before it writes."""

    epoch: str | None
    seq: int | None
    commits: int
    # The places of the checkpoint by their texts.
    places: dict[str, StoredPlace]
    lease: int
    # The number of the last log entry that the checkpoint contains.
    checkpoint: int
    # `places` in its stored form.
    places_text: bytes
    # The first field that cannot be read and counts as absent, None if all can be read. Only a new epoch may be written
    # over such a field.
    problem: StoredValueError | None = None
    # Whether `copies` of the epoch have their mark, if they are whole. Epochs of older routers have none.
    has_mark: bool = False

    @classmethod
    def of(
        cls,
        key: str,
        epoch: bytes | None,
        seq: bytes | None,
        commits: bytes | None,
        places: bytes | None,
        lease: bytes | None,
        checkpoint: bytes | None,
        sum_: bytes | None,
        mark: bytes | None = None,
        unreadable: bytes | None = None,
    ) -> Head:
        """Parse the fields of `meta` at `key`.

        The field `unreadable` is the reason why a router cannot read the worker's values.
        """
        problem: StoredValueError | None = None

        def read(field: str, value: bytes | None, parse: Callable[[bytes], T], absent: T) -> T:
            nonlocal problem
            try:
                return absent if value is None else parse(value)
            except ValueError:
                problem = problem or StoredValueError(key, field, value)
                return absent

        head = cls(
            epoch=read(keys.META_EPOCH, epoch, decode_text, None),
            places=read(keys.META_PLACES, places, parse_places, {}),
            seq=read(keys.META_SEQ, seq, keys.parse_number, None),
            commits=read(keys.META_COMMITS, commits, keys.parse_number, 0),
            lease=read(keys.META_LEASE, lease, keys.parse_number, 0),
            checkpoint=read(keys.META_CHECKPOINT, checkpoint, keys.parse_number, 0),
            places_text=places or b"",
            has_mark=mark is not None,
        )
        if epoch is not None and sum_ != head_sum(epoch, seq or b"", commits or b"", places or b"", checkpoint or b""):
            problem = problem or StoredValueError(key, keys.META_SUM, sum_)
        if not 0 <= head.commits - head.checkpoint <= MAX_TAIL_ENTRIES:
            problem = problem or StoredValueError(key, keys.META_CHECKPOINT, checkpoint)
        if unreadable is not None:
            problem = problem or StoredValueError(key, keys.META_UNREADABLE, unreadable)
        return msgspec.structs.replace(head, problem=problem)

    @property
    def written(self) -> tuple[str | None, int | None]:
        """The (epoch, seq) committed last; (None, None) if the head cannot be read, so that nothing continues it."""
        return (self.epoch, self.seq) if self.problem is None else (None, None)

    @property
    def hides_keys(self) -> bool:
        """Whether the head does not show which keys the epoch has."""
        return self.problem is not None and self.problem.field in (keys.META_EPOCH, keys.META_PLACES)


def head_sum(epoch: bytes, seq: bytes, commits: bytes, places: bytes, checkpoint: bytes) -> bytes:
    """Return the checksum of these fields of `meta` as they are stored; an absent field counts as empty."""
    return checksum(epoch, seq, commits, places, checkpoint)


def head_fields(epoch: str, seq: int | None, commits: int, checkpoint: int, places_text: bytes) -> dict[str, bytes]:
    """Return the fields of `meta` that describe the state of a worker's index, with their checksum."""
    fields = {
        keys.META_EPOCH: encode_text(epoch),
        keys.META_SEQ: b"" if seq is None else b"%d" % seq,
        keys.META_COMMITS: b"%d" % commits,
        keys.META_PLACES: places_text,
        keys.META_CHECKPOINT: b"%d" % checkpoint,
    }
    fields[keys.META_SUM] = head_sum(*fields.values())
    if seq is None:
        del fields[keys.META_SEQ]
    return fields


def next_fields(head: Head, seq: int | None) -> dict[str, bytes]:
    """Return the fields of `meta` that a further log entry changes, with their new values.

    Args:
        head: The fields before the entry.
        seq: The last committed seq after it.
    """
    fields = head_fields(head.epoch or "", seq, head.commits + 1, head.checkpoint, head.places_text)
    return {name: value for name, value in fields.items() if name not in _SET_BY_CHECKPOINTS}


_SET_BY_CHECKPOINTS = frozenset({keys.META_EPOCH, keys.META_PLACES, keys.META_CHECKPOINT})


def continues(commit: Commit, seq: int | None) -> bool:
    """Return whether the commit's seqs follow `seq`, the last committed one.

    With None, the commit must be the first of its epoch, which may start anywhere. A hole would mean that the store lost
    commits, so that it holds blocks long gone, or lacks some.
    """
    return commit.may_be_first if seq is None else commit.first_seq == seq + 1


def checked_meta(meta: dict[str, bytes] | None) -> dict[str, bytes]:
    """Return `meta`, or an empty dict for None. Raises ValueError if it sets fields of the store."""
    if taken := set(keys.META_FIELDS) & set(meta or ()):
        raise ValueError(f"meta fields {sorted(taken)} are the store's own; name yours differently")
    return meta or {}


def epoch_keys(worker: WorkerKey, head: Head) -> list[str]:
    """Return all keys of the current epoch; a name without a key costs nothing to UNLINK."""
    epoch = head.epoch or ""
    residents = [keys.residents(worker, epoch, keys.parse_place(text)) for text in head.places]
    return [*residents, keys.copies(worker, epoch)]


def unlink_all(worker: WorkerKey, head: Head) -> bytes:
    """Return the command that unlinks all keys of the worker, the lease included."""
    return command("UNLINK", keys.meta(worker), keys.log(worker), keys.lease(worker), *epoch_keys(worker, head))


def copies_commands(worker: WorkerKey, epoch: str, copies: Iterable[tuple[Place, int, int]]) -> Iterable[bytes]:
    """Yield the commands that write these numbers of copies, in the form of `Commit.copies`."""
    kept_fields: list[bytes] = []
    dropped_fields: list[bytes] = []
    for place, block_hash, count in copies:
        field = keys.copies_field(place, block_hash)
        if count >= 2:
            kept_fields += (field, copies_value(field, count))
        else:
            dropped_fields.append(field)
    key = keys.copies(worker, epoch)
    if kept_fields:
        yield command("HSET", key, *kept_fields)
    if dropped_fields:
        yield command("HDEL", key, *dropped_fields)


def copies_value(field: bytes, count: int) -> bytes:
    """Return the stored value for a block with several copies: their number, with a checksum of field and number."""
    number = b"%d" % count
    return number + b" " + checksum(field, number)


def parse_copies_value(field: bytes, value: bytes) -> int:
    """Return the number of copies. Raises ValueError for a value that `copies_value` never writes."""
    number, _, digest = value.partition(b" ")
    if digest != checksum(field, number):
        raise ValueError(f"the checksum of {value!r} is wrong")
    return keys.parse_number(number)


def hset(key: str, fields: dict[str, bytes]) -> bytes:
    """Return the command that sets these fields of a HASH."""
    return command("HSET", key, *(part for name, value in fields.items() for part in (encode_text(name), value)))
