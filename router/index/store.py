# SPDX-License-Identifier: Apache-2.0
"""The index in Redis: fenced commits, and loading what they left; with leases, registry and peers beside them.

Invariants:
- A commit is one MULTI/EXEC of native commands on one worker's keys. It applies only if its lease is the one that the
  worker has now, its epoch is the current one and its seqs continue the committed ones; else it changes nothing. The
  lease is watched, so it cannot end between check and EXEC.
- Residency of an epoch that ended leaves no key behind: the epoch's places are kept in `meta`, so voiding is UNLINK
  of a few keys, never a scan.
- Each commit, note and new epoch writes exactly one log entry, numbered without holes per worker.

Not here: counting copies (ingest), deciding who should own a worker (streams/assignment.py), following the log
(log_follower.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvrouter.router.common.ids import Place, WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.index.commit import (
    HEAD_FIELDS,
    NO_LOG_ID,
    Commit,
    CommitOutcome,
    Head,
    Lease,
    WorkerImage,
    checked_meta,
    continues,
    copies_commands,
    epoch_keys,
    hset,
    new_places,
    residency_commands,
    unlink_all,
)
from kvrouter.router.index.leases import Leases
from kvrouter.router.index.log_entry import EntryKind, decode_text, encode_text, entry_fields
from kvrouter.router.index.peers import Peers
from kvrouter.router.index.registry import Registry
from kvrouter.router.index.transactions import Transactions, multi, pairs
from kvrouter.router.redis_client.connection import Connection
from kvrouter.router.redis_client.errors import StoredValueError, StoreUnavailable
from kvrouter.router.redis_client.resp import Hashes, command, hashes_from_bytes, info_field
from kvrouter.router.redis_client.servers import Servers

# A block hash as a member of a SET.
HASH_BYTES = 8
# Entries kept of each worker's log. An owner commits a few hundred times a second at most, so a follower may be
# seconds behind before it must load again, which takes a fraction of a second; at 2,048 transitions a commit a full
# log is 16 MiB.
LOG_ENTRIES = 1_024
# About how many bytes of each worker's log are kept where commits are larger than that (a flood, a snapshot): some of
# its entries then go earlier, and a follower that was behind loads again. One entry is kept however large.
LOG_BYTES = 64 * 1024**2
# SMEMBERS of 10^6 hashes takes about 0.2 s of the server's one thread; several routers may load at once.
LOAD_TIMEOUT_S = 60.0
# Times an image is read again when its epoch ended meanwhile or a place came to it, both of which are rare.
LOAD_ATTEMPTS = 16
# Copies of a block are counted in 16 bits (copy_counts.py), and stored from 2 on.
_COPIES_MIN, _COPIES_MAX = 2, 2**16 - 1


class IndexStore:
    """The index on one server or cluster. Safe for concurrent use within one event loop; raises StoreUnavailable and
    StoreError."""

    def __init__(self, servers: Servers, *, log_entries: int = LOG_ENTRIES) -> None:
        self.servers = servers
        self._transactions = Transactions(servers)
        self.leases = Leases(self._transactions)
        self.peers = Peers(self._transactions)
        self.registry = Registry(self._transactions)
        self._log_entries = log_entries

    @classmethod
    async def open(cls, url: str, *, log_entries: int = LOG_ENTRIES) -> IndexStore:
        """Connects to redis://, rediss://, unix:// or redis+sentinel://; a cluster is recognised by itself.

        log_entries: about how many entries of each worker's log are kept."""
        return cls(await Servers.open(url), log_entries=log_entries)

    async def close(self) -> None:
        await self.servers.close()

    async def eviction_policies(self) -> dict[str, str]:
        """The maxmemory-policy of each server, by its address; INFO says it also where CONFIG is forbidden."""
        found = await self.servers.each(command("INFO", "memory"))
        return {server: info_field(info, "maxmemory_policy") for server, (info,) in found.items()}

    async def forget(self, worker: WorkerKey, token: str) -> bool:
        """Unlinks all that the index holds of `worker`, unless another token has its lease: for every process that
        learns that its registration is gone, as any of them may have taken the lease meanwhile."""

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            free = holder is None or Lease.token_of(holder) in (None, token)
            return [unlink_all(worker, head)] if free else False

        return await self._transactions.run(worker, write) is None

    # -- commits

    async def open_epoch(
        self, worker: WorkerKey, epoch: str, lease: Lease, meta: dict[str, bytes] | None = None
    ) -> CommitOutcome:
        """Starts `epoch`: what the old epoch held is unlinked, meta replaced. STALE: it is the current epoch."""
        fields = checked_meta(meta)
        garbage = False

        def write(holder: bytes | None, head: Head) -> list[bytes] | CommitOutcome:
            nonlocal garbage
            if holder != lease.value:
                return CommitOutcome.FENCED
            if head.epoch == epoch and head.problem is None:
                return CommitOutcome.STALE
            garbage = head.problem is not None
            meta_key, commits = keys.meta(worker), head.commits + 1
            own = {
                keys.META_EPOCH: encode_text(epoch),
                keys.META_COMMITS: b"%d" % commits,
                keys.META_PLACES: b"",
                keys.META_LEASE: b"%d" % lease.number,
            }
            return [
                command("UNLINK", meta_key, *epoch_keys(worker, head)),
                hset(meta_key, own | fields),
                self._xadd(worker, entry_fields(EntryKind.EPOCH, commits, epoch, meta=fields)),
            ]

        outcome = await self._transactions.run(worker, write) or CommitOutcome.APPLIED
        if garbage and outcome is CommitOutcome.APPLIED:
            # Which keys the old epoch had is not known.
            unlink = self._transactions.unlink_epochs
            await self.servers.on(keys.meta(worker), lambda connection: unlink(connection, worker, epoch))
        return outcome

    async def note(self, worker: WorkerKey, epoch: str, lease: Lease, meta: dict[str, bytes]) -> CommitOutcome:
        """Sets fields of meta while `epoch` is current, without a batch."""
        fields = checked_meta(meta)

        def write(holder: bytes | None, head: Head) -> list[bytes] | CommitOutcome:
            if holder != lease.value:
                return CommitOutcome.FENCED
            if head.problem is not None:
                raise head.problem
            if head.epoch != epoch:
                return CommitOutcome.STALE
            commits = head.commits + 1
            return [
                hset(keys.meta(worker), {keys.META_COMMITS: b"%d" % commits} | fields),
                self._xadd(worker, entry_fields(EntryKind.NOTE, commits, epoch, meta=fields)),
            ]

        return await self._transactions.run(worker, write) or CommitOutcome.APPLIED

    async def commit(self, commit: Commit, lease: Lease) -> CommitOutcome:
        """Applies `commit` if `lease` counts, its epoch is current and first_seq is the committed seq + 1.

        The first commit of an epoch may start at any seq. A commit may be of any size, but its transitions also stay in
        the log: cut snapshots into commits of some 10,000."""
        if commit.first_seq > commit.last_seq:
            raise ValueError(f"seqs {commit.first_seq}..{commit.last_seq} are none: a commit holds at least one batch")
        fields = checked_meta(commit.meta)
        worker, epoch = commit.worker, commit.epoch

        def write(holder: bytes | None, head: Head) -> list[bytes] | CommitOutcome:
            if holder != lease.value:
                return CommitOutcome.FENCED
            if head.problem is not None:
                raise head.problem
            if head.epoch != epoch or not continues(commit, head.seq):
                return CommitOutcome.STALE
            commits = head.commits + 1
            own = {keys.META_SEQ: b"%d" % commit.last_seq, keys.META_COMMITS: b"%d" % commits}
            places = dict.fromkeys([*head.places, *new_places(commit)])
            if len(places) > len(head.places):
                own[keys.META_PLACES] = " ".join(places).encode()
            seqs = (commit.first_seq, commit.last_seq)
            return [
                *residency_commands(commit),
                *copies_commands(commit),
                hset(keys.meta(worker), own | fields),
                self._xadd(worker, entry_fields(EntryKind.COMMIT, commits, epoch, seqs, commit.changes, fields)),
            ]

        return await self._transactions.run(worker, write) or CommitOutcome.APPLIED

    async def report_unreadable(self, worker: WorkerKey, reason: str) -> None:
        """Lets whoever follows the worker know that what is stored of it cannot be read, so that it opens a new
        epoch."""
        order = hset(keys.meta(worker), {keys.META_UNREADABLE: encode_text(reason)})
        # Nobody follows it: then the next who does loads it.
        await self._transactions.run(worker, lambda holder, head: False if holder is None else [order])

    def _xadd(self, worker: WorkerKey, fields: list[bytes]) -> bytes:
        size_bytes = sum(map(len, fields))
        entries = max(1, min(self._log_entries, LOG_BYTES // size_bytes))
        return command("XADD", keys.log(worker), "MAXLEN", "~", entries, "*", *fields)

    # -- reading

    async def load(self, worker: WorkerKey) -> WorkerImage:
        """What the store holds of `worker`, all of one moment; following the log from there goes on from it."""
        meta_key, log_key = keys.meta(worker), keys.log(worker)

        async def read(connection: Connection) -> WorkerImage:
            ((epoch, places),) = await connection.run(command("HMGET", meta_key, keys.META_EPOCH, keys.META_PLACES), 1)
            head = _readable(Head.of(meta_key, epoch, None, None, places, None))
            for _ in range(LOAD_ATTEMPTS):
                named = [keys.parse_place(text) for text in head.places]
                sets = [keys.residents(worker, head.epoch or "", place) for place in named]
                orders = [
                    command("HGETALL", meta_key),
                    command("XREVRANGE", log_key, "+", "-", "COUNT", 1),
                    *(command("SMEMBERS", key) for key in sets),
                ]
                request = multi(orders)
                *_, replies = await connection.run(request, len(orders) + 2, LOAD_TIMEOUT_S)
                for key, reply in zip((meta_key, log_key, *sets), replies, strict=True):
                    if isinstance(reply, Exception):
                        raise StoredValueError(key, "", reply)
                fields, newest, *members = replies
                meta = _meta_of(meta_key, fields)
                # What another router could not read, this one may: then there is nothing to say.
                meta.pop(keys.META_UNREADABLE, None)
                asked, head = head, _readable(Head.of(meta_key, *(meta.pop(name, None) for name in HEAD_FIELDS)))
                if (head.epoch, head.places) == (asked.epoch, asked.places):
                    found = {place: _hashes_of(key, m) for place, key, m in zip(named, sets, members, strict=True)}
                    log_id = newest[0][0].decode("ascii") if newest else NO_LOG_ID
                    return WorkerImage(worker, head.epoch, head.seq, meta, log_id, head.commits, found)
            raise StoreUnavailable(f"{meta_key} kept changing its epoch or places while it was read")

        return await self._transactions.read(meta_key, read, "a key of its worker")

    async def load_copies(self, worker: WorkerKey) -> dict[tuple[Place, int], int]:
        """The copies of the current epoch, where 2 or more, by place and block hash. Exact for the lease holder."""
        meta_key = keys.meta(worker)

        async def read(connection: Connection) -> dict[tuple[Place, int], int]:
            (epoch,) = await connection.run(command("HGET", meta_key, keys.META_EPOCH), 1)
            if epoch is None:
                return {}
            head = _readable(Head.of(meta_key, epoch, None, None, None, None))
            key = keys.copies(worker, head.epoch or "")
            (fields,) = await connection.run(command("HGETALL", key), 1, LOAD_TIMEOUT_S)
            return dict(_copies_of(key, fields))

        return await self._transactions.read(meta_key, read, "a key of its worker")

    async def committed(self, worker: WorkerKey) -> tuple[str | None, int | None]:
        """The current epoch and its last committed seq: shows an owner whether the store lost what it committed."""
        key = keys.meta(worker)
        try:
            fields = await self._transactions.reply(key, command("HMGET", key, *HEAD_FIELDS))
        except StoredValueError:
            return None, None
        head = Head.of(key, *fields)
        # What cannot be read is nothing to go on from.
        return (head.epoch, head.seq) if head.problem is None else (None, None)


def _hashes_of(key: str, members: list[Any]) -> Hashes:
    # A few of other lengths could add up to the right sum.
    for member in members:
        if len(member) != HASH_BYTES:
            raise StoredValueError(key, "a member", member)
    return hashes_from_bytes(b"".join(members))


def _readable(head: Head) -> Head:
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
    for field, value in pairs(fields):
        try:
            count = keys.parse_number(value)
            if not _COPIES_MIN <= count <= _COPIES_MAX:
                raise ValueError(f"{count} copies")
            yield keys.parse_copies_field(field), count
        except ValueError:
            raise StoredValueError(key, repr(field), value) from None
