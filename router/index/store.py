# SPDX-License-Identifier: Apache-2.0
"""The index in Redis: fenced commits, leases, the registry, and loading.

Invariants:
- A commit is one MULTI/EXEC of native commands on one worker's keys. It applies only if its lease is the one that the
  worker has now, its epoch is the current one and its seqs continue the committed ones; else it changes nothing. The
  lease is watched, so it cannot end between check and EXEC. (Redis 6.0.9 and later abort for a watched key that
  expired.)
- Residency of an epoch that ended leaves no key behind: the epoch's places are kept in `meta`, so voiding is UNLINK
  of a few keys, never a scan.
- Each commit, note and new epoch writes exactly one log entry, numbered without holes per worker.

Not here: counting copies (ingest), deciding who should own a worker (router.shares), following the log
(log_follower.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from kvrouter.router.common.ids import Place, WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.index.commit import (
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
)
from kvrouter.router.index.log_entry import EntryKind, decode_text, encode_text, entry_fields
from kvrouter.router.ingest.net_changes import ResidencyDelta
from kvrouter.router.redis_client.connection import Connection
from kvrouter.router.redis_client.errors import ReplyError, StoredValueError, StoreError, StoreUnavailable
from kvrouter.router.redis_client.resp import Hashes, command, hashes_from_bytes
from kvrouter.router.redis_client.servers import Servers

__all__ = [
    "Commit",
    "CommitOutcome",
    "IndexStore",
    "Lease",
    "ReplyError",
    "ResidencyDelta",
    "StoreError",
    "StoreUnavailable",
    "StoredValueError",
    "WorkerImage",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Names of keys looked at in one command: some hundred microseconds of the server's one thread.
SCAN_KEYS = 1_000
# A block hash as a member of a SET.
HASH_BYTES = 8

# Entries kept of each worker's log. An owner commits a few hundred times a second at most, so a follower may be
# seconds behind before it must load anew, which takes a fraction of a second; at 2,048 transitions a commit a full
# log is 16 MiB.
LOG_ENTRIES = 1_024
# About how many bytes of each worker's log are kept where commits are larger than that (a flood, a snapshot): some of
# its entries then go earlier, and a follower that was behind loads anew. One entry is kept however large.
LOG_BYTES = 64 * 1024**2
# A lease renewal or a take-over may touch the watched keys between check and EXEC; either happens once in seconds.
CONFLICTS_MAX = 8
# SMEMBERS of 10^6 hashes takes about 0.2 s of the server's one thread; several routers may load at once.
LOAD_TIMEOUT_S = 60.0
# Times an image is read again when its epoch ended meanwhile or a place came to it, both of which are rare.
LOAD_ATTEMPTS = 16
# A heartbeat and a look at the others: later than this, the answer is about a moment that is over.
BEAT_TIMEOUT_S = 1.0
_HEAD_FIELDS = (
    keys.META_EPOCH,
    keys.META_SEQ,
    keys.META_COMMITS,
    keys.META_PLACES,
    keys.META_LEASE,
    keys.META_UNREADABLE,
)
# A key of the wrong type; it can only be dropped.
_WRONG_TYPE = "WRONGTYPE"
# Copies of a block are counted in 16 bits (copy_counts.py), and stored from 2 on.
_COPIES_MIN, _COPIES_MAX = 2, 2**16 - 1

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

    async def eviction_policies(self) -> dict[str, str]:
        """The maxmemory-policy of each server, by its address; INFO says it also where CONFIG is forbidden."""
        found = await self.servers.each(command("INFO", "memory"))
        return {server: _policy_in(info) for server, (info,) in found.items()}

    # -- registry

    async def put_registration(self, worker: WorkerKey, registration: bytes) -> None:
        """Stores what was registered for `worker`, in place of what was there."""
        key = keys.registry(worker.model)
        await self.servers.run(key, command("HSET", key, keys.registry_field(worker), registration))
        await self.servers.run(keys.MODELS, command("SADD", keys.MODELS, keys.model_member(worker.model)))
        await self._registry_changed()

    async def _registry_changed(self) -> None:
        """After the change itself: whoever sees the new number sees the change."""
        await self.servers.run(keys.REGISTRATIONS, command("INCR", keys.REGISTRATIONS))

    async def registry_version(self) -> int:
        """Rises with each change of the registry. Lower than it was: the store lost what was written meanwhile, or it
        is no number, which counts as lost."""
        key = keys.REGISTRATIONS
        try:
            (version,) = await self._read(key, command("GET", key))
            return keys.parse_number(version or b"0")
        except (ValueError, StoredValueError) as error:
            # INCR refuses it, and with that every registration.
            await self.servers.run(key, command("DEL", key))
            log.warning("stored value dropped", extra={"key": key, "reason": str(error)})
            return 0

    async def restore_registrations(self, known: dict[WorkerKey, bytes], above: int) -> None:
        """Writes back what the store lost; what is there stays. The version rises over `above`."""
        for worker, registration in known.items():
            key = keys.registry(worker.model)
            await self.servers.run(key, command("HSETNX", key, keys.registry_field(worker), registration))
            await self.servers.run(keys.MODELS, command("SADD", keys.MODELS, keys.model_member(worker.model)))
        missing = above + 1 - await self.registry_version()
        if missing > 0:
            # Two routers that do this at once raise it twice, which only makes all read once more.
            await self.servers.run(keys.REGISTRATIONS, command("INCRBY", keys.REGISTRATIONS, missing))

    async def registrations(self) -> tuple[dict[WorkerKey, bytes], list[StoredValueError]]:
        """All registered workers, of all models, and what of the registry cannot be read."""
        found: dict[WorkerKey, bytes] = {}
        unreadable: list[StoredValueError] = []
        (members,) = await self._read(keys.MODELS, command("SMEMBERS", keys.MODELS))
        for member in members:
            try:
                model = keys.parse_model_member(member)
            except ValueError:
                unreadable.append(StoredValueError(keys.MODELS, "a member", member))
                continue
            key = keys.registry(model)
            try:
                (fields,) = await self._read(key, command("HGETALL", key))
            except StoredValueError as error:
                unreadable.append(error)
                continue
            for field, value in _pairs(fields):
                try:
                    found[keys.parse_registry_field(model, field)] = value
                except ValueError:
                    unreadable.append(StoredValueError(key, "the name of a field", field))
        return found, unreadable

    async def _read(self, key: str, order: bytes) -> list[Any]:
        """Raises StoredValueError where `key` is of another type than we write."""
        try:
            return await self.servers.run(key, order)
        except ReplyError as error:
            if error.code != _WRONG_TYPE:
                raise
            raise StoredValueError(key, "", "of a type that no router writes") from None

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

        await self._registry_changed()

        def write(holder: bytes | None, head: Head) -> list[bytes]:
            return [_unlink_all(worker, head)]

        await self._transact(worker, write)
        return bool(dropped)

    async def forget(self, worker: WorkerKey, token: str) -> bool:
        """Unlinks all that the index holds of `worker`, unless another token has its lease: for every process that
        learns that its registration is gone, as any of them may have taken the lease meanwhile."""

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            free = holder is None or Lease.token_of(holder) in (None, token)
            return [_unlink_all(worker, head)] if free else False

        return await self._transact(worker, write) is None

    # -- routers and leases

    async def beat(self, token: str, heartbeat: bytes) -> dict[bytes, bytes]:
        """Writes this router's heartbeat; returns those of all, by token. Whoever wrote them: they are to be judged."""
        orders = (command("HSET", keys.ROUTERS, token, heartbeat), command("HGETALL", keys.ROUTERS))

        async def work(connection: Connection) -> list[Any]:
            return await connection.run(b"".join(orders), len(orders))

        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                _, fields = await self.servers.on(keys.ROUTERS, work, urgent=True)
        except TimeoutError:
            raise StoreUnavailable(f"the server did not answer in {BEAT_TIMEOUT_S:g} s") from None
        except ReplyError as error:
            if error.code != "WRONGTYPE":
                raise
            # Of an older version, or another program's: no router can say anything until it is gone.
            await self.servers.run(keys.ROUTERS, command("DEL", keys.ROUTERS))
            raise
        return dict(_pairs(fields))

    async def heartbeats(self) -> dict[bytes, bytes]:
        """The heartbeats of all routers, by token; also of some that are gone."""
        (fields,) = await self.servers.run(keys.ROUTERS, command("HGETALL", keys.ROUTERS))
        return dict(_pairs(fields))

    async def drop_heartbeats(self, tokens: Iterable[str]) -> None:
        """`tokens` must not be empty. A router that lives writes its own again."""
        await self.servers.run(keys.ROUTERS, command("HDEL", keys.ROUTERS, *tokens))

    async def put_claim(self, token: str, claim: bytes) -> None:
        """What the sources of router `token` show it, in place of what it said before."""
        await self.servers.run(keys.CLAIMS, command("HSET", keys.CLAIMS, token, claim))

    async def claims(self) -> dict[str, bytes]:
        """By token; also of routers that are gone."""
        (fields,) = await self._read(keys.CLAIMS, command("HGETALL", keys.CLAIMS))
        return {token.decode(errors="replace"): claim for token, claim in _pairs(fields)}

    async def drop_claims(self, tokens: Iterable[str]) -> None:
        """`tokens` must not be empty."""
        await self.servers.run(keys.CLAIMS, command("HDEL", keys.CLAIMS, *tokens))

    async def take_lease(self, worker: WorkerKey, token: str, ttl_s: float, *, above: int = 0) -> Lease | None:
        """A new lease for ttl_s from now, in place of an older one of the same token. None: another token has one.

        above: the highest number that this process had. A number of above + 1 says that nobody else had the lease
        since, or that the store lost who had."""
        taken: Lease | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal taken
            if holder is not None and Lease.token_of(holder) not in (None, token):
                return False
            taken = Lease(token, max(head.lease, above) + 1)
            return [
                command("SET", keys.lease(worker), taken.value, "PX", _milliseconds(ttl_s)),
                hset(keys.meta(worker), {keys.META_LEASE: b"%d" % taken.number}),
            ]

        return taken if await self._transact(worker, write) is None else None

    async def renew_lease(self, worker: WorkerKey, lease: Lease, ttl_s: float) -> Head | None:
        """What the store holds of the worker, and the lease now ends in ttl_s. None: it was lost, and nothing
        changed."""
        return await self._if_leased(
            worker, lease, lambda head: command("PEXPIRE", keys.lease(worker), _milliseconds(ttl_s))
        )

    async def release_lease(self, worker: WorkerKey, lease: Lease) -> bool:
        """Gives the lease back, if it still counts."""
        return await self._if_leased(worker, lease, lambda head: command("DEL", keys.lease(worker))) is not None

    async def _if_leased(self, worker: WorkerKey, lease: Lease, order: Callable[[Head], bytes]) -> Head | None:
        seen: Head | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal seen
            seen = head
            return [order(head)] if holder == lease.value else False

        return seen if await self._transact(worker, write) is None else None

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

        outcome = await self._transact(worker, write) or CommitOutcome.APPLIED
        if garbage and outcome is CommitOutcome.APPLIED:
            # Which keys the old epoch had is not known.
            await self.servers.on(keys.meta(worker), lambda connection: self._unlink_epochs(connection, worker, epoch))
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

        return await self._transact(worker, write) or CommitOutcome.APPLIED

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
            try:
                _, holder, head = await connection.run(watch, 3)
            except ReplyError as error:
                if error.code != _WRONG_TYPE:
                    raise
                await self._drop_foreign(connection, worker)
                return False, None
            orders = write(holder, Head.of(meta, *head))
            if not isinstance(orders, list):
                await connection.run(_UNWATCH, 1)
                return True, orders
            replies = await connection.run(b"".join((_MULTI, *orders, _EXEC)), len(orders) + 2)
            done = replies[-1]
            if done is None:
                return False, None
            for reply in done:
                if not isinstance(reply, Exception):
                    continue
                if str(reply).startswith(_WRONG_TYPE):
                    # The rest of it was done, so what is stored is none of the two states: only a new epoch mends that.
                    await self._drop_foreign(connection, worker)
                    raise StoredValueError(meta, "a key of its worker", "of a type that no router writes")
                raise StoreError(f"{meta}: the server refused a part of a commit: {reply}")
            return True, None

        for _ in range(CONFLICTS_MAX):
            finished, result = await self.servers.on(meta, attempt)
            if finished:
                return result
        raise StoreError(f"{meta} kept changing while it was written; more than one router writes it: see their leases")

    async def _drop_foreign(self, connection: Connection, worker: WorkerKey) -> None:
        """Drops keys of the worker that are of another type than we write: they hold nothing, and refuse every command
        of ours."""
        wanted = {keys.lease(worker): b"string", keys.meta(worker): b"hash", keys.log(worker): b"stream"}
        _, *types = await connection.run(
            b"".join((_UNWATCH, *(command("TYPE", key) for key in wanted))), 1 + len(wanted)
        )
        foreign = [
            key for (key, kind), found in zip(wanted.items(), types, strict=True) if found not in (kind, b"none")
        ]
        if foreign:
            log.warning("stored keys of another type dropped", extra={"keys": foreign})
            await connection.run(command("UNLINK", *foreign), 1)
        if keys.meta(worker) in foreign:
            await self._unlink_epochs(connection, worker, None)

    async def _unlink_epochs(self, connection: Connection, worker: WorkerKey, kept: str | None) -> None:
        """Unlinks what the worker has of all epochs but `kept`. It looks at the names of all keys of the server, ten a
        worker: only for when `meta` does not tell them."""
        cursor = b"0"
        while True:
            order = command("SCAN", cursor, "MATCH", keys.of_epochs(worker), "COUNT", SCAN_KEYS)
            ((cursor, found),) = await connection.run(order, 1)
            beginning = None if kept is None else keys.copies(worker, kept).removesuffix("copies").encode()
            gone = [key for key in found if beginning is None or not key.startswith(beginning)]
            if gone:
                await connection.run(command("UNLINK", *gone), 1)
            if cursor == b"0":
                return

    async def report_unreadable(self, worker: WorkerKey, reason: str) -> None:
        """Lets whoever follows the worker know that what is stored of it cannot be read, so that it opens a new
        epoch."""
        order = hset(keys.meta(worker), {keys.META_UNREADABLE: encode_text(reason)})
        # Nobody follows it: then the next who does loads it.
        await self._transact(worker, lambda holder, head: False if holder is None else [order])

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
                request = b"".join((_MULTI, *orders, _EXEC))
                *_, replies = await connection.run(request, len(orders) + 2, LOAD_TIMEOUT_S)
                for key, reply in zip((meta_key, log_key, *sets), replies, strict=True):
                    if isinstance(reply, Exception):
                        raise StoredValueError(key, "", reply)
                fields, newest, *members = replies
                meta = _meta_of(meta_key, fields)
                # What another router could not read, this one may: then there is nothing to say.
                meta.pop(keys.META_UNREADABLE, None)
                asked, head = head, _readable(Head.of(meta_key, *(meta.pop(name, None) for name in _HEAD_FIELDS)))
                if (head.epoch, head.places) == (asked.epoch, asked.places):
                    found = {place: _hashes_of(key, m) for place, key, m in zip(named, sets, members, strict=True)}
                    log_id = newest[0][0].decode("ascii") if newest else NO_LOG_ID
                    return WorkerImage(worker, head.epoch, head.seq, meta, log_id, head.commits, found)
            raise StoreUnavailable(f"{meta_key} kept changing its epoch or places while it was read")

        return await self._on(meta_key, read)

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

        return await self._on(meta_key, read)

    async def _on(self, key: str, read: Callable[[Connection], Awaitable[T]]) -> T:
        """As `servers.on`; raises StoredValueError where a key is of another type than we write."""
        try:
            return await self.servers.on(key, read)
        except ReplyError as error:
            if error.code != _WRONG_TYPE:
                raise
            raise StoredValueError(key, "a key of its worker", "of a type that no router writes") from None

    async def committed(self, worker: WorkerKey) -> tuple[str | None, int | None]:
        """The current epoch and its last committed seq: shows an owner whether the store lost what it committed."""
        key = keys.meta(worker)
        try:
            (fields,) = await self._read(key, command("HMGET", key, *_HEAD_FIELDS))
        except StoredValueError:
            return None, None
        head = Head.of(key, *fields)
        # What cannot be read is nothing to go on from.
        return (head.epoch, head.seq) if head.problem is None else (None, None)


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _unlink_all(worker: WorkerKey, head: Head) -> bytes:
    return command("UNLINK", keys.meta(worker), keys.log(worker), keys.lease(worker), *epoch_keys(worker, head))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))


def _hashes_of(key: str, members: list[Any]) -> Hashes:
    # A few of other lengths could add up to the right sum.
    for member in members:
        if len(member) != HASH_BYTES:
            raise StoredValueError(key, "a member", member)
    return hashes_from_bytes(b"".join(members))


def _policy_in(info: bytes) -> str:
    for line in info.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"maxmemory_policy":
            return value.decode("ascii", "replace")
    return ""


def _readable(head: Head) -> Head:
    if head.problem is not None:
        raise head.problem
    return head


def _meta_of(key: str, fields: list[bytes]) -> dict[str, bytes]:
    try:
        return {decode_text(field): value for field, value in _pairs(fields)}
    except ValueError:
        raise StoredValueError(
            key, "the name of a field", [name for name in fields[::2] if not name.isascii()]
        ) from None


def _copies_of(key: str, fields: list[bytes]) -> Iterable[tuple[tuple[Place, int], int]]:
    for field, value in _pairs(fields):
        try:
            count = keys.parse_number(value)
            if not _COPIES_MIN <= count <= _COPIES_MAX:
                raise ValueError(f"{count} copies")
            yield keys.parse_copies_field(field), count
        except ValueError:
            raise StoredValueError(key, repr(field), value) from None
