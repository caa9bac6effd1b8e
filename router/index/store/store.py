# SPDX-License-Identifier: Apache-2.0
"""The index in Redis: fenced commits, and the state that they left, with leases, registry and peers beside them.

Invariants:
- A commit is one MULTI/EXEC of native commands on one worker's keys. It applies only if its lease is the worker's
  present lease, its epoch is the current one and its seqs continue the committed ones; else it changes nothing. The
  lease is watched, so it cannot end between check and EXEC.
- Each commit, note and new epoch writes exactly one log entry, numbered without holes per worker. Residency is the
  checkpoint with the changes of the entries after it, so the log is never trimmed behind the checkpoint.
- Residency of an epoch that ended leaves no key behind. The checkpoint's places are kept in `meta`, so voiding is
  UNLINK of a few keys, never a scan.

Other modules count copies (router/index/ingest), decide which process owns a worker (router/follow/fleet/assignment.py)
and when a checkpoint is due (router/follow/streams/commits.py), read a stored worker (stored_worker.py), and follow
the log (log_follower.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.base.redis_client.resp import command, info_field, long_command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import Checkpoint, checkpoint_commands, pack_places, places_text
from kvrouter.router.index.store.commit import (
    Commit,
    CommitOutcome,
    Head,
    LeaseValue,
    WorkerImage,
    checked_meta,
    continues,
    copies_commands,
    epoch_keys,
    head_fields,
    hset,
    next_fields,
    unlink_all,
)
from kvrouter.router.index.store.common_keys import CommonKeys
from kvrouter.router.index.store.leases import Leases
from kvrouter.router.index.store.log_entry import EntryKind, encode_text, entry_fields
from kvrouter.router.index.store.peers import Peers
from kvrouter.router.index.store.registry import Registry
from kvrouter.router.index.store.schemas import Schemas
from kvrouter.router.index.store.stored_worker import load_copies, load_image
from kvrouter.router.index.store.transactions import Transactions

# Entries kept of each worker's log. An owner commits a few hundred times a second at most, so a follower may be seconds
# behind before it must load again, which takes a fraction of a second. With 2,048 transitions in each commit, a full
# log is 16 MiB.
LOG_ENTRIES = 1_024
# The approximate number of bytes kept of a worker's log whose commits are larger than that (a flood, a snapshot). Some
# entries are then dropped earlier, and a follower that was behind loads again. One entry is kept however large.
LOG_BYTES = 64 * 1024**2


class IndexStore:
    """The index on one server or cluster.

    It is safe for concurrent use within one event loop. The methods raise StoreUnavailable and StoreError.
    """

    def __init__(
        self, servers: Servers, *, log_entries: int = LOG_ENTRIES, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.servers = servers
        self._transactions = Transactions(servers)
        self.leases = Leases(self._transactions, wall_clock)
        self.peers = Peers(self._transactions)
        self.registry = Registry(self._transactions, wall_clock)
        self.schemas = Schemas(self._transactions)
        self.common_keys = CommonKeys(self._transactions)
        self._log_entries = log_entries
        # The number of each worker's last log entry that this process wrote, or knows to be written.
        self.last_entries: dict[WorkerKey, int] = {}

    @classmethod
    async def open(
        cls, url: str, *, log_entries: int = LOG_ENTRIES, wall_clock: Callable[[], float] = time.time
    ) -> IndexStore:
        """Connect to redis://, rediss://, unix:// or redis+sentinel://. A cluster is recognised without being named.

        Args:
            url: The URL of the store.
            log_entries: About how many entries of each worker's log are kept.
            wall_clock: Returns the seconds since 1970.
        """
        return cls(await Servers.open(url), log_entries=log_entries, wall_clock=wall_clock)

    async def close(self) -> None:
        """Close all connections."""
        await self.servers.close()

    async def eviction_policies(self) -> dict[str, str]:
        """Return the maxmemory-policy of each server by its address; INFO shows it even where CONFIG is forbidden."""
        replies = await self.servers.each(command("INFO", "memory"))
        return {server: info_field(info, "maxmemory_policy") for server, (info,) in replies.items()}

    async def forget(self, worker: WorkerKey, token: str) -> bool:
        """Unlink all that the index holds of `worker`, unless another token has its lease.

        Every process that learns that the registration is gone calls this, as any of them may have taken the lease
        meanwhile. Return whether the keys were unlinked.
        """
        self.last_entries.pop(worker, None)

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            free = holder is None or LeaseValue.token_of(holder) in (None, token)
            return [unlink_all(worker, head)] if free else False

        return await self._transactions.run(worker, write) is None

    # -- commits

    async def open_epoch(
        self, worker: WorkerKey, epoch: str, lease: LeaseValue, meta: dict[str, bytes] | None = None
    ) -> CommitOutcome:
        """Start `epoch`: unlink the blocks of the old epoch and replace `meta`.

        The outcome is STALE if `epoch` is current already.
        """
        fields = checked_meta(meta)
        garbage = False

        def write(head: Head) -> list[bytes] | CommitOutcome:
            nonlocal garbage
            if head.epoch == epoch and head.problem is None:
                return CommitOutcome.STALE
            garbage = head.hides_keys
            meta_key, commits = keys.meta(worker), head.commits + 1
            own = head_fields(epoch, None, commits, commits, b"")
            own |= {keys.META_LEASE: b"%d" % lease.number, keys.META_MARK: b"1"}
            return [
                command("UNLINK", meta_key, *epoch_keys(worker, head)),
                hset(meta_key, own | fields),
                *copies_commands(worker, epoch, [(*keys.COPIES_MARK, 2)]),
                self._xadd(worker, 0, entry_fields(worker, EntryKind.EPOCH, commits, epoch, meta=fields)),
            ]

        outcome = await self._write(worker, lease, write)
        if garbage and outcome is CommitOutcome.APPLIED:
            # It is not known which keys the old epoch had.
            unlink = self._transactions.unlink_epochs
            await self.servers.on(keys.meta(worker), lambda connection: unlink(connection, worker, epoch))
        return outcome

    async def note(
        self, worker: WorkerKey, epoch: str, lease: LeaseValue, meta: dict[str, bytes], known: int = 0
    ) -> CommitOutcome:
        """Set fields of `meta` without a batch, if `epoch` is current; `known` is as in `commit`."""
        fields = checked_meta(meta)

        def write(head: Head) -> list[bytes] | CommitOutcome:
            if head.problem is not None:
                raise head.problem
            if head.epoch != epoch:
                return CommitOutcome.STALE
            commits = head.commits + 1
            own = next_fields(head, head.seq)
            entry = entry_fields(worker, EntryKind.NOTE, commits, epoch, meta=fields)
            return [hset(keys.meta(worker), own | fields), self._xadd(worker, commits - head.checkpoint, entry)]

        return await self._write(worker, lease, write, known=known)

    async def commit(self, commit: Commit, lease: LeaseValue, known: int = 0) -> CommitOutcome:
        """Apply `commit` if `lease` counts, its epoch is current and first_seq is the committed seq + 1.

        The first commit of an epoch may start at any seq. A commit may be of any size, but its transitions also stay in
        the log, so cut snapshots into commits of some 10,000. Raises ValueError if the commit holds no batch.

        Args:
            commit: The commit.
            lease: The lease under which it applies.
            known: The number of the last log entry that the writer knows to be stored. If the store has fewer entries, it
                lost some, and the outcome is STALE: an entry in the place of a lost one would pass for it.
        """
        if commit.first_seq > commit.last_seq:
            raise ValueError(
                f"seqs {commit.first_seq}..{commit.last_seq} are no range: a commit holds at least one batch"
            )
        fields = checked_meta(commit.meta)
        worker, epoch = commit.worker, commit.epoch

        def write(head: Head) -> list[bytes] | CommitOutcome:
            if head.problem is not None:
                raise head.problem
            if head.epoch != epoch or not continues(commit, head.seq):
                return CommitOutcome.STALE
            commits = head.commits + 1
            own = next_fields(head, commit.last_seq)
            entry = entry_fields(
                worker, EntryKind.COMMIT, commits, epoch, (commit.first_seq, commit.last_seq), commit.changes, fields
            )
            return [
                *copies_commands(worker, epoch, commit.copies),
                hset(keys.meta(worker), own | fields),
                self._xadd(worker, commits - head.checkpoint, entry),
            ]

        return await self._write(worker, lease, write, known=known)

    async def checkpoint(self, checkpoint: Checkpoint, lease: LeaseValue) -> CommitOutcome:
        """Replace the checkpoint if `lease` counts and the new one is of the last seq of the current epoch.

        Writing the same checkpoint twice changes nothing.
        """
        worker, packed = checkpoint.worker, pack_places(checkpoint.places)

        def write(head: Head) -> list[bytes] | CommitOutcome:
            if head.problem is not None:
                raise head.problem
            if (head.epoch, head.seq) != (checkpoint.epoch, checkpoint.seq):
                return CommitOutcome.STALE
            own = head_fields(checkpoint.epoch, head.seq, head.commits, head.commits, places_text(packed))
            return [*checkpoint_commands(checkpoint, packed, head.places), hset(keys.meta(worker), own)]

        return await self._write(worker, lease, write, entries=0)

    async def _write(
        self,
        worker: WorkerKey,
        lease: LeaseValue,
        write: Callable[[Head], list[bytes] | CommitOutcome],
        *,
        entries: int = 1,
        known: int = 0,
    ) -> CommitOutcome:
        """Execute the commands that `write` returns for the head of `meta` if `lease` counts; update `last_entries`.

        Args:
            worker: The worker.
            lease: The lease under which the commands apply.
            write: Returns the commands, or an outcome that needs none.
            entries: How many log entries the commands add.
            known: As in `commit`.
        """
        before = 0

        def write_fenced(holder: bytes | None, head: Head) -> list[bytes] | CommitOutcome:
            nonlocal before
            before = head.commits
            if holder != lease.value:
                return CommitOutcome.FENCED
            return CommitOutcome.STALE if head.commits < known else write(head)

        outcome = await self._transactions.run(worker, write_fenced) or CommitOutcome.APPLIED
        if outcome is not CommitOutcome.FENCED:
            self.last_entries[worker] = before + (entries if outcome is CommitOutcome.APPLIED else 0)
        return outcome

    async def report_unreadable(self, worker: WorkerKey, reason: str) -> None:
        """Mark the stored values of `worker` as unreadable, so that the router that follows it opens a new epoch."""
        order = hset(keys.meta(worker), {keys.META_UNREADABLE: encode_text(reason)})
        # If no router follows the worker, the next one that does will load it.
        await self._transactions.run(worker, lambda holder, head: False if holder is None else [order])

    def _xadd(self, worker: WorkerKey, tail: int, fields: list[bytes]) -> bytes:
        """Return the command that appends an entry to the worker's log.

        Args:
            worker: The worker.
            tail: The number of entries after the checkpoint, this one included, which are kept.
            fields: The entry.
        """
        size_bytes = sum(map(len, fields))
        entries = max(1, tail, min(self._log_entries, LOG_BYTES // size_bytes))
        return long_command("XADD", keys.log(worker), "MAXLEN", "~", entries, "*", *fields)

    # -- reading

    async def load(self, worker: WorkerKey) -> WorkerImage:
        """Return the stored state of `worker` at one moment; following the log from there continues it."""
        return await load_image(self._transactions, worker)

    async def load_copies(self, worker: WorkerKey) -> dict[tuple[Place, int], int]:
        """Return the number of copies, where 2 or more, by place and block hash, for the current epoch.

        The numbers are exact for the holder of the lease.
        """
        return await load_copies(self._transactions, worker)

    async def committed(self, worker: WorkerKey) -> tuple[str | None, int | None]:
        """Return the current epoch and its last committed seq, which show an owner if the store lost commits."""
        key = keys.meta(worker)
        try:
            fields = await self._transactions.reply(key, command("HMGET", key, *keys.META_FIELDS))
        except StoredValueError:
            return None, None
        return Head.of(key, *fields).written
