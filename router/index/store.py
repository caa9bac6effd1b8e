# SPDX-License-Identifier: Apache-2.0
"""The index in Redis: fenced commits, leases, the registry, and loading.

Invariants:
- A commit is one MULTI/EXEC of native commands on one worker's keys. It applies only if its token holds the worker's
  lease, its epoch is the current one and its seqs continue the committed ones; else it changes nothing.
- Residency of an epoch that ended leaves no key behind: the epoch's places are kept in `meta`, so voiding is UNLINK
  of a few keys, never a scan.
- Each commit and each new epoch writes exactly one log entry, numbered without holes per worker.

Not here: counting copies (ingest), deciding who should own a worker (router.worker), following the log (follower.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvrouter.router.index import keys
from kvrouter.router.index.commit import (
    Commit,
    CommitOutcome,
    Head,
    WorkerImage,
    checked_meta,
    continues,
    copies_commands,
    epoch_keys,
    hset,
    new_places,
    residency_commands,
)
from kvrouter.router.index.connection import Connection, ReplyError, StoreError, StoreUnavailable
from kvrouter.router.index.log import EntryKind, decode_text, encode_text, entry_fields
from kvrouter.router.index.resp import Hashes, command, hashes_from_bytes
from kvrouter.router.index.servers import Servers
from kvrouter.router.names import Place, WorkerKey
from kvrouter.router.transitions import Change

__all__ = [
    "Change",
    "Commit",
    "CommitOutcome",
    "IndexStore",
    "ReplyError",
    "StoreError",
    "StoreUnavailable",
    "WorkerImage",
]

T = TypeVar("T")

# Entries kept of each worker's log. An owner commits a few hundred times a second at most, so a follower may be
# seconds behind before it must load anew, which takes a fraction of a second; at 2,048 transitions a commit a full
# log is 16 MiB.
LOG_ENTRIES = 1_024
# About how many bytes of each worker's log are kept where commits are larger than that (a flood, a snapshot): some of its entries
# then go earlier, and a follower that was behind loads anew. One entry is kept however large.
LOG_BYTES = 64 * 1024**2
# A lease renewal or a take-over may touch the watched keys between check and EXEC; either happens once in seconds.
CONFLICTS_MAX = 8
# SMEMBERS of 10^6 hashes takes about 0.2 s of the server's one thread; several routers may load at once.
LOAD_TIMEOUT_S = 60.0
# Times an image is read again when its epoch ended meanwhile. The last one is right too, once the log is followed.
LOAD_ATTEMPTS = 3
NO_LOG_ID = "0-0"
_HEAD_FIELDS = (keys.META_EPOCH, keys.META_SEQ, keys.META_COMMITS, keys.META_PLACES)

_UNWATCH = command("UNWATCH")
_MULTI = command("MULTI")
_EXEC = command("EXEC")


class IndexStore:
    """The index on one server or cluster. Safe for concurrent use within one event loop; raises StoreUnavailable and
    StoreError."""

    def __init__(self, servers: Servers, *, log_entries: int = LOG_ENTRIES) -> None:
        self.servers = servers
        self._log_entries = log_entries

    @classmethod
    async def open(cls, url: str, *, log_entries: int = LOG_ENTRIES) -> IndexStore:
        """Connects to redis://, rediss://, unix:// or a cluster, which is recognised by itself.

        log_entries: about how many entries of each worker's log are kept."""
        return cls(await Servers.open(url), log_entries=log_entries)

    async def close(self) -> None:
        await self.servers.close()

    # -- registry

    async def put_registration(self, worker: WorkerKey, registration: bytes) -> None:
        """Stores what was registered for `worker`, in place of what was there."""
        key = keys.registry(worker.model)
        await self.servers.run(key, command("HSET", key, keys.registry_field(worker), registration))
        await self.servers.run(keys.MODELS, command("SADD", keys.MODELS, keys.model_member(worker.model)))

    async def registrations(self) -> dict[WorkerKey, bytes]:
        """All registered workers, of all models."""
        found: dict[WorkerKey, bytes] = {}
        (members,) = await self.servers.run(keys.MODELS, command("SMEMBERS", keys.MODELS))
        for model in map(keys.parse_model_member, members):
            key = keys.registry(model)
            (fields,) = await self.servers.run(key, command("HGETALL", key))
            for field, value in _pairs(fields):
                found[keys.parse_registry_field(model, field)] = value
        return found

    async def drop_registration(self, worker: WorkerKey) -> bool:
        """Forgets `worker` and unlinks all that the index holds of it; its owner is FENCED from then on.

        False: it was not registered."""
        key = keys.registry(worker.model)
        (dropped,) = await self.servers.run(key, command("HDEL", key, keys.registry_field(worker)))
        (left,) = await self.servers.run(key, command("HLEN", key))
        if not left:
            member = keys.model_member(worker.model)
            await self.servers.run(keys.MODELS, command("SREM", keys.MODELS, member))
            # Another process may have registered a worker of this model between the two; its own SADD may be over
            # already.
            (left,) = await self.servers.run(key, command("HLEN", key))
            if left:
                await self.servers.run(keys.MODELS, command("SADD", keys.MODELS, member))

        def write(lease: bytes | None, head: Head) -> list[bytes]:
            own = [keys.meta(worker), keys.log(worker), keys.lease(worker), *epoch_keys(worker, head)]
            return [command("UNLINK", *own)]

        await self._transact(worker, write)
        return bool(dropped)

    # -- leases

    async def take_lease(self, worker: WorkerKey, token: str, ttl_s: float) -> bool:
        """True: `token` holds the lease for ttl_s from now. False: another token does."""
        key = keys.lease(worker)
        (taken,) = await self.servers.run(key, command("SET", key, token, "NX", "PX", _milliseconds(ttl_s)))
        return taken is not None or await self.renew_lease(worker, token, ttl_s)

    async def renew_lease(self, worker: WorkerKey, token: str, ttl_s: float) -> bool:
        """True: the lease that `token` still held now ends in ttl_s. False: it was lost, and nothing changed."""
        return await self._if_leased(worker, token, command("PEXPIRE", keys.lease(worker), _milliseconds(ttl_s)))

    async def release_lease(self, worker: WorkerKey, token: str) -> bool:
        """Gives the lease back, if `token` holds it."""
        return await self._if_leased(worker, token, command("DEL", keys.lease(worker)))

    async def _if_leased(self, worker: WorkerKey, token: str, order: bytes) -> bool:
        def write(lease: bytes | None, head: Head) -> list[bytes] | bool:
            return [order] if lease == token.encode() else False

        return await self._transact(worker, write) is None

    # -- commits

    async def open_epoch(
        self, worker: WorkerKey, epoch: str, token: str, meta: dict[str, bytes] | None = None
    ) -> CommitOutcome:
        """Starts `epoch`: what the old epoch held is unlinked, meta replaced. STALE: it is the current epoch."""
        fields = checked_meta(meta)

        def write(lease: bytes | None, head: Head) -> list[bytes] | CommitOutcome:
            if lease != token.encode():
                return CommitOutcome.FENCED
            if head.epoch == epoch:
                return CommitOutcome.STALE
            meta_key, commits = keys.meta(worker), head.commits + 1
            own = {keys.META_EPOCH: encode_text(epoch), keys.META_COMMITS: b"%d" % commits, keys.META_PLACES: b""}
            return [
                command("UNLINK", meta_key, *epoch_keys(worker, head)),
                hset(meta_key, own | fields),
                self._xadd(worker, entry_fields(EntryKind.EPOCH, commits, epoch, meta=fields)),
            ]

        return await self._transact(worker, write) or CommitOutcome.APPLIED

    async def commit(self, commit: Commit, token: str) -> CommitOutcome:
        """Applies `commit` if `token` holds the lease, its epoch is current and first_seq is the committed seq + 1.

        The first commit of an epoch may start at any seq. A commit may be of any size, but its transitions also stay in
        the log: cut snapshots into commits of some 10,000."""
        if commit.first_seq > commit.last_seq:
            raise ValueError(f"seqs {commit.first_seq}..{commit.last_seq} are none: a commit holds at least one batch")
        fields = checked_meta(commit.meta)
        worker, epoch = commit.worker, commit.epoch

        def write(lease: bytes | None, head: Head) -> list[bytes] | CommitOutcome:
            if lease != token.encode():
                return CommitOutcome.FENCED
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

        return await self._transact(worker, write) or CommitOutcome.APPLIED

    async def _transact(self, worker: WorkerKey, write: Callable[[bytes | None, Head], list[bytes] | T]) -> T | None:
        """Watches lease and meta, asks `write` what to do with them: commands to execute, or a result that needs none.

        None: the commands were executed. `write` is asked again when lease or meta changed in between."""
        lease, meta = keys.lease(worker), keys.meta(worker)
        watch = b"".join(
            (
                command("WATCH", lease, meta),
                command("GET", lease),
                command("HMGET", meta, *_HEAD_FIELDS),
            )
        )

        async def attempt(connection: Connection) -> tuple[bool, T | None]:
            _, holder, head = await connection.run(watch, 3)
            orders = write(holder, Head.of(*head))
            if not isinstance(orders, list):
                await connection.run(_UNWATCH, 1)
                return True, orders
            replies = await connection.run(b"".join((_MULTI, *orders, _EXEC)), len(orders) + 2)
            done = replies[-1]
            if done is None:
                return False, None
            for reply in done:
                if isinstance(reply, Exception):
                    raise StoreError(f"{meta}: the server refused a part of a commit: {reply}")
            return True, None

        for _ in range(CONFLICTS_MAX):
            finished, result = await self.servers.on(meta, attempt)
            if finished:
                return result
        raise StoreError(f"{meta} kept changing while it was written; more than one router writes it: see their leases")

    def _xadd(self, worker: WorkerKey, fields: list[bytes]) -> bytes:
        size_bytes = sum(map(len, fields))
        entries = max(1, min(self._log_entries, LOG_BYTES // size_bytes))
        return command("XADD", keys.log(worker), "MAXLEN", "~", entries, "*", *fields)

    # -- reading

    async def load(self, worker: WorkerKey) -> WorkerImage:
        """What the store holds of `worker`. Exact while nobody commits, so for whoever holds the lease.

        Otherwise the sets may show entries after log_id already; following the log from there makes them exact,
        because what an entry does may be done twice."""
        meta_key, log_key = keys.meta(worker), keys.log(worker)
        head_request = b"".join(
            (_MULTI, command("HGETALL", meta_key), command("XREVRANGE", log_key, "+", "-", "COUNT", 1), _EXEC)
        )

        async def read(connection: Connection) -> tuple[bool, WorkerImage]:
            *_, (fields, newest) = await connection.run(head_request, 4, LOAD_TIMEOUT_S)
            meta = {decode_text(field): value for field, value in _pairs(fields)}
            head = Head.of(*(meta.pop(name, None) for name in _HEAD_FIELDS))
            places: dict[Place, Hashes] = {}
            for text in head.places:
                place = keys.parse_place(text)
                key = keys.residents(worker, head.epoch or "", place)
                (members,) = await connection.run(command("SMEMBERS", key), 1, LOAD_TIMEOUT_S)
                places[place] = _hashes_of(key, members)
            (epoch,) = await connection.run(command("HGET", meta_key, keys.META_EPOCH), 1)
            unchanged = (None if epoch is None else decode_text(epoch)) == head.epoch
            log_id = newest[0][0].decode("ascii") if newest else NO_LOG_ID
            return unchanged, WorkerImage(worker, head.epoch, head.seq, meta, log_id, head.commits, places)

        for _ in range(LOAD_ATTEMPTS):
            unchanged, image = await self.servers.on(meta_key, read)
            if unchanged:
                break
        return image

    async def load_copies(self, worker: WorkerKey) -> dict[tuple[Place, int], int]:
        """The copies of the current epoch, where 2 or more, by place and block hash. Exact for the lease holder."""
        meta_key = keys.meta(worker)

        async def read(connection: Connection) -> dict[tuple[Place, int], int]:
            (epoch,) = await connection.run(command("HGET", meta_key, keys.META_EPOCH), 1)
            if epoch is None:
                return {}
            request = command("HGETALL", keys.copies(worker, decode_text(epoch)))
            (fields,) = await connection.run(request, 1, LOAD_TIMEOUT_S)
            return {keys.parse_copies_field(field): int(count) for field, count in _pairs(fields)}

        return await self.servers.on(meta_key, read)

    async def committed(self, worker: WorkerKey) -> tuple[str | None, int | None]:
        """The current epoch and its last committed seq: shows an owner whether the store lost what it committed."""
        key = keys.meta(worker)
        ((epoch, seq),) = await self.servers.run(key, command("HMGET", key, keys.META_EPOCH, keys.META_SEQ))
        return (None if epoch is None else decode_text(epoch)), (None if seq is None else int(seq))


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))


def _hashes_of(key: str, members: list[Any]) -> Hashes:
    packed = b"".join(members)
    if len(packed) != 8 * len(members):
        raise StoreError(f"{key} holds members that are not 8 bytes: another program writes there; give us another db")
    return hashes_from_bytes(packed)
