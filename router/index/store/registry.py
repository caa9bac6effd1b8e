# SPDX-License-Identifier: Apache-2.0
"""The registered workers.

Values are decoded and checked when they are read, because other programs may have written there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import unlink_all
from kvrouter.router.index.store.transactions import CONFLICTS_MAX, UNWATCH, Transactions, multi, pairs
from kvrouter.router.model.workers.hash_algorithms import HASH_ALGOS
from kvrouter.router.model.workers.registration import MAX_GROUPS, MAX_TOKENS, CatalogSpec, Registration
from kvrouter.router.model.workers.worker_spec import (
    endpoint_problem,
    key_name_problem,
    none_hash_problem,
    patch_key_problem,
    patch_problem,
    peer_problem,
    plain_none_hash,
    url_problem,
    worker_id_problem,
)

log = logging.getLogger(__name__)

# A larger number is none that routers write: it would not leave room for the next one.
REVISION_MAX = 2**62


class StoredRegistration(Registration, frozen=True, omit_defaults=True):
    """A registration as Redis has it."""

    # Rises with each change of the worker, so that the later of two values is known. Routers of versions before it
    # write none.
    revision: int = 0


class _Revision(msgspec.Struct, frozen=True):
    revision: Annotated[int, msgspec.Meta(ge=0, lt=REVISION_MAX)] = 0


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Registration).decode
_decode_revision = msgspec.json.Decoder(_Revision).decode


def decode(worker: WorkerKey, raw: bytes, prefix: str = keys.PREFIX) -> Registration:
    """Return the registration of `worker`, in the schema of `prefix`. Raises StoredValueError."""
    try:
        registration = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        registration = None
    if registration is None or registration.worker != worker or any(_problems(registration)):
        raise StoredValueError(keys.registry(worker.model, prefix), keys.registry_field(worker), raw)
    return registration


def worker_of(raw: bytes) -> WorkerKey | None:
    """Return the worker of a stored registration, or None if the value is no registration."""
    try:
        return _decode(raw).worker
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _revision(raw: bytes) -> int:
    """Return the revision of a stored registration, or 0 if it has none that a router writes."""
    try:
        return _decode_revision(raw).revision
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0


def is_outdated(stored: bytes, known: bytes) -> bool:
    """Return whether the store lost the registration `known` and has an earlier one.

    A value without a revision is not outdated, because a router of an earlier version may have written it since.
    """
    return 0 < _revision(stored) < _revision(known)


def _problems(registration: Registration) -> Iterator[str | None]:
    """Yield a problem, or None, for each value that the router would connect to or that sizes the hit rule's tables."""
    yield worker_id_problem(registration.worker.worker_id)
    for endpoint in (registration.events, registration.replay):
        yield endpoint and endpoint_problem(endpoint)
    if registration.url is not None:
        yield url_problem(registration.url)
    if registration.patch is not None:
        yield patch_problem(registration.patch)
    if registration.engine_key is not None:
        yield key_name_problem(registration.engine_key)
    if registration.peer is not None:
        yield peer_problem(registration.peer, registration.worker.dp_rank)
    if registration.patch_key is not None:
        yield patch_key_problem(registration.patch_key, registration.patch)
    yield _size_problem(registration.block_size)
    yield from _catalog_problems(registration.catalog or CatalogSpec())


def _catalog_problems(catalog: CatalogSpec) -> Iterator[str | None]:
    if len(catalog.groups) > MAX_GROUPS:
        yield "too many groups"
    for size in (
        catalog.hash_block_size,
        catalog.scheduler_block_size,
        catalog.offload_blocks_per_chunk,
    ):
        yield _size_problem(size)
    yield _size_problem(catalog.hash_lookahead_tokens, least=0)
    yield None if catalog.hash_algo in (None, *HASH_ALGOS) else "no algorithm"
    if catalog.none_hash is not None:
        yield none_hash_problem(catalog.none_hash, catalog.hash_algo)
        yield None if catalog.none_hash == plain_none_hash(catalog.none_hash) else "no plain hash"
    for group in catalog.groups:
        if group.group_idx is not None and not 0 <= group.group_idx < MAX_GROUPS:
            yield "no group"
        for size in (group.block_size, group.sliding_window, group.attention_chunk_size):
            yield _size_problem(size)


def _size_problem(size: int | None, least: int = 1) -> str | None:
    return None if size is None or least <= size <= MAX_TOKENS else "no size"


class Registry:
    """The registrations in Redis, as bytes. The methods raise StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions, wall_clock: Callable[[], float]) -> None:
        self._transactions = transactions
        self._servers = transactions.servers
        self._wall_clock = wall_clock
        # The highest revision that was read or written here.
        self._revision = 0

    def value(self, registration: Registration) -> bytes:
        """Return the value to store for a registration, with a higher revision than all that were read here.

        The revision is the time in ms where that is higher, so that it rises also after a loss of all values.
        """
        self._revision = max(self._revision + 1, int(self._wall_clock() * 1000))
        return encode(StoredRegistration(**msgspec.structs.asdict(registration), revision=self._revision))

    async def put(self, worker: WorkerKey, registration: bytes) -> int:
        """Store the registration of `worker`, in place of an earlier one, and return the version that has it."""
        key = keys.registry(worker.model)
        *_, version = await self._servers.run_each(
            (key, command("HSET", key, keys.registry_field(worker), registration)),
            (keys.MODELS, command("SADD", keys.MODELS, keys.model_member(worker.model))),
            # The number comes last, so that a router that sees the new number sees the change.
            (keys.REGISTRATIONS, command("INCR", keys.REGISTRATIONS)),
        )
        return int(version)

    async def stored(self, worker: WorkerKey) -> bytes | None:
        """Return the registration of one worker as it is stored, or None if there is none."""
        key = keys.registry(worker.model)
        raw: bytes | None = await self._transactions.reply(key, command("HGET", key, keys.registry_field(worker)))
        if raw is not None:
            self._revision = max(self._revision, _revision(raw))
        return raw

    async def version(self) -> int:
        """Return the version of the registry, which rises with each change.

        A lower version than before means that the store lost the changes made meanwhile. A value that is no number is
        dropped and counts as lost.
        """
        key = keys.REGISTRATIONS
        try:
            version = await self._transactions.reply(key, command("GET", key))
            return keys.parse_number(version or b"0")
        except (ValueError, StoredValueError) as error:
            # INCR refuses such a value, so no worker could be registered.
            await self._servers.run(key, command("DEL", key))
            log.warning("stored value dropped", extra={"key": key, "reason": str(error)})
            return 0

    async def restore(self, known: Mapping[WorkerKey, bytes], above: int) -> None:
        """Write back the registrations that the store lost, and raise the version, to more than `above`.

        A registration that the store has stays, unless it is outdated.
        """
        for worker, registration in known.items():
            await self._write_back(worker, registration)
            await self._servers.run(keys.MODELS, command("SADD", keys.MODELS, keys.model_member(worker.model)))
        # Two routers that do this at once raise the version twice, which only makes all routers read once more.
        rise = max(1, above + 1 - await self.version())
        await self._servers.run(keys.REGISTRATIONS, command("INCRBY", keys.REGISTRATIONS, rise))

    async def _write_back(self, worker: WorkerKey, known: bytes) -> None:
        key, field = keys.registry(worker.model), keys.registry_field(worker)
        watch = command("WATCH", key) + command("HGET", key, field)

        async def attempt(connection: Connection) -> bool:
            _, stored = await connection.run(watch, 2)
            if stored is not None and not is_outdated(stored, known):
                await connection.run(UNWATCH, 1)
                return True
            *_, done = await connection.run(multi([command("HSET", key, field, known)]), 3)
            return done is not None

        for _ in range(CONFLICTS_MAX):
            if await self._servers.on(key, attempt):
                return
        raise StoreError(f"{key} kept changing while a registration was written back")

    async def load(self) -> tuple[dict[WorkerKey, bytes], list[StoredValueError]]:
        """Return the registrations of all workers of all models, and the values of the registry that cannot be read."""
        registrations, unreadable = await load_registry(self._transactions)
        self._revision = max((self._revision, *map(_revision, registrations.values())))
        return registrations, unreadable

    async def drop(self, worker: WorkerKey) -> bool:
        """Drop the registration of `worker`, and unlink all that the index holds of it.

        The owner of the worker is FENCED from then on. Return whether the worker was registered.
        """
        key = keys.registry(worker.model)
        (dropped,) = await self._servers.run(key, command("HDEL", key, keys.registry_field(worker)))
        (left,) = await self._servers.run(key, command("HLEN", key))
        if not left:
            member = keys.model_member(worker.model)
            await self._servers.run(keys.MODELS, command("SREM", keys.MODELS, member))
            # Between HLEN and SREM another process may have registered a worker of this model, and its own SADD may be
            # over already.
            (left,) = await self._servers.run(key, command("HLEN", key))
            if left:
                await self._servers.run(keys.MODELS, command("SADD", keys.MODELS, member))
        await self._servers.run(keys.REGISTRATIONS, command("INCR", keys.REGISTRATIONS))
        await self.void(worker)
        return bool(dropped)

    async def void(self, worker: WorkerKey) -> None:
        """Unlink all that the index holds of `worker`, which stays registered. Its owner is FENCED from then on."""
        await self._transactions.run(worker, lambda holder, head: [unlink_all(worker, head)])


async def load_registry(
    transactions: Transactions, prefix: str = keys.PREFIX
) -> tuple[dict[WorkerKey, bytes], list[StoredValueError]]:
    """Return the registrations and the unreadable values of the schema of `prefix`, as `Registry.load` does."""
    registrations: dict[WorkerKey, bytes] = {}
    unreadable: list[StoredValueError] = []
    models = keys.models(prefix)
    for member in await transactions.reply(models, command("SMEMBERS", models)):
        try:
            model = keys.parse_model_member(member)
        except ValueError:
            unreadable.append(StoredValueError(models, "a member", member))
            continue
        key = keys.registry(model, prefix)
        try:
            fields = await transactions.reply(key, command("HGETALL", key))
        except StoredValueError as error:
            unreadable.append(error)
            continue
        for field, value in pairs(fields):
            try:
                registrations[keys.parse_registry_field(model, field)] = value
            except ValueError:
                unreadable.append(StoredValueError(key, "the name of a field", field))
    return registrations, unreadable
