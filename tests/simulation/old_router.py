# SPDX-License-Identifier: Apache-2.0
"""A router of an older version: it neither writes nor reads what was added to the stored forms of schema 3 since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.follow.streams.peer_view import META_STATE_WRITER
from kvrouter.router.index.store import keys, stored_worker
from kvrouter.router.index.store.commit import Commit, CommitOutcome, Head, LeaseValue, WorkerImage
from kvrouter.router.index.store.peers import Peers
from kvrouter.router.index.store.registry import Registry, encode
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.workers.registration import Registration

# The fields of heartbeats that were added.
NEWER_FIELDS = ("software", "settings", "confirmed")

_decode = msgspec.json.Decoder(Registration).decode


class OldPeers(Peers):
    """The reports without the newer fields of heartbeats."""

    async def beat(self, token: str, heartbeat: bytes) -> dict[bytes, bytes]:
        """Write a heartbeat."""
        fields = msgspec.msgpack.decode(heartbeat)
        return await super().beat(
            token, msgspec.msgpack.encode({name: fields[name] for name in fields if name not in NEWER_FIELDS})
        )


class OldRegistry(Registry):
    """The registrations without revisions, which are lost where a registration is written back."""

    def value(self, registration: Registration) -> bytes:
        """Return the value to store for a registration."""
        return encode(registration)

    async def stored(self, worker: WorkerKey) -> bytes | None:
        """Return the registration of one worker, or None if there is none."""
        raw = await super().stored(worker)
        return None if raw is None else _without_revision(raw)

    async def load(self) -> tuple[dict[WorkerKey, bytes], list[StoredValueError]]:
        """Return the registrations of all workers, and the values that cannot be read."""
        registrations, unreadable = await super().load()
        return {worker: _without_revision(raw) for worker, raw in registrations.items()}, unreadable


def _without_revision(raw: bytes) -> bytes:
    try:
        return encode(_decode(raw))
    except msgspec.MsgspecError:
        return raw


class OldStore(IndexStore):
    """The index without the writers of states, and without the marks that show whether numbers of copies were lost."""

    def __init__(self, servers: Servers, *, log_entries: int, wall_clock: Callable[[], float]) -> None:
        super().__init__(servers, log_entries=log_entries, wall_clock=wall_clock)
        self.peers = OldPeers(self._transactions)
        self.registry = OldRegistry(self._transactions, wall_clock)
        # The commands that take the mark from the epoch that is being opened.
        self._unmarking: dict[WorkerKey, list[bytes]] = {}

    async def open_epoch(
        self, worker: WorkerKey, epoch: str, lease: LeaseValue, meta: dict[str, bytes] | None = None
    ) -> CommitOutcome:
        """Start an epoch without the mark."""
        self._unmarking[worker] = [
            command("HDEL", keys.meta(worker), keys.META_MARK),
            command("HDEL", keys.copies(worker, epoch), keys.copies_field(*keys.COPIES_MARK)),
        ]
        try:
            return await super().open_epoch(worker, epoch, lease, _without_writer(meta or {}))
        finally:
            del self._unmarking[worker]

    async def note(
        self, worker: WorkerKey, epoch: str, lease: LeaseValue, meta: dict[str, bytes], known: int = 0
    ) -> CommitOutcome:
        """Set fields of `meta`."""
        return await super().note(worker, epoch, lease, _without_writer(meta), known)

    async def commit(self, commit: Commit, lease: LeaseValue, known: int = 0) -> CommitOutcome:
        """Apply a commit."""
        return await super().commit(msgspec.structs.replace(commit, meta=_without_writer(commit.meta)), lease, known)

    async def _write(
        self,
        worker: WorkerKey,
        lease: LeaseValue,
        write: Callable[[Head], list[bytes] | CommitOutcome],
        **options: Any,
    ) -> CommitOutcome:
        def write_old(head: Head) -> list[bytes] | CommitOutcome:
            commands = write(head)
            return [*commands, *self._unmarking.get(worker, ())] if isinstance(commands, list) else commands

        return await super()._write(worker, lease, write_old, **options)

    async def load(self, worker: WorkerKey) -> WorkerImage:
        """Return the stored state of a worker."""
        image = await super().load(worker)
        return msgspec.structs.replace(image, meta=_without_writer(image.meta))

    async def load_copies(self, worker: WorkerKey) -> dict[tuple[Place, int], int]:
        """Return the numbers of copies, to which a mark counts as any other block."""

        async def read(connection: Connection) -> dict[tuple[Place, int], int]:
            head = await stored_worker._read_head(connection, keys.meta(worker))
            if head.epoch is None:
                return {}
            key = keys.copies(worker, head.epoch)
            (fields,) = await connection.run(command("HGETALL", key), 1)
            return dict(stored_worker._copies_of(key, fields))

        return await self._transactions.read(keys.meta(worker), read, "a key of its worker")


def _without_writer(meta: dict[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in meta.items() if name != META_STATE_WRITER}
