# SPDX-License-Identifier: Apache-2.0
"""The owners of stored responses, shared by all routers on one Redis. The async shell around `owner_table.py`.

An owner is remembered here at once and in Redis soon after. Without Redis, this process still knows the responses that
it made or found before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvrouter.router.base.common.errors import Conflict, OwnerGone, StoreDown, UnknownResponse
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store import keys
from kvrouter.router.route.owners.owner_metrics import OwnerMetrics
from kvrouter.router.route.owners.owner_table import OwnerTable
from kvrouter.router.route.owners.response_owner import USABLE_ID, ResponseOwner, packed, unpacked

log = logging.getLogger("kvrouter.owners")

# A conversation of an agent is often continued on the next day. Engines keep responses as long as their process runs.
TTL_S = 24 * 3600
# The responses that a process remembers, about 400 bytes each here and in Redis: two hours of ten turns a second. A
# process removes from Redis what it forgets, so Redis holds at most this many for each process.
MAX_KNOWN = 65_536
# Changes that are written at once, so that other tasks and commits get their turn.
CHANGES_PER_WRITE = 256
# The pause before an unknown response is looked up once more: a client may ask another router for it before the owner
# has been written. Writes take a few milliseconds.
GRACE_S = 0.1
# A lookup takes less than a millisecond; a request does not wait longer than this for a Redis that hangs.
LOOKUP_TIMEOUT_S = 2.0
RETRY_S = 1.0


class EngineSign(NamedTuple):
    """The signs by which the end of an engine's process is recognised."""

    is_down: bool
    # When the process started, in seconds since 1970; None if it is not known.
    start_s: float | None


class ResponseOwners:
    """The owners of responses, as one process knows them.

    A response keeps the caller that it was first made for: another caller that names the same id does not get it.
    """

    def __init__(
        self,
        metrics: OwnerMetrics,
        clock: Callable[[], float],
        *,
        engine: Callable[[WorkerKey], EngineSign | None],
        servers: Servers | None = None,
        supervisor: TaskSupervisor | None = None,
        max_known: int = MAX_KNOWN,
    ) -> None:
        """Begin without any responses.

        Args:
            metrics: The metrics.
            clock: Returns monotonic seconds.
            engine: Returns the present signs of a worker's engine, or None if the worker is not registered.
            servers: The servers of Redis; None shares nothing.
            supervisor: Runs the writer; None only without servers.
            max_known: The number of responses to remember.
        """
        self._metrics = metrics
        self._engine = engine
        self._servers = servers
        self._supervisor = supervisor
        self._table = OwnerTable(clock, max_count=max_known, ttl_s=TTL_S)
        self._max_known = max_known
        # The changes that are not in Redis yet: the owner, or None to forget the response there.
        self._unwritten: dict[str, ResponseOwner | None] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Why owners are not shared, or None while they are.
        self.problem: str | None = None
        metrics.known.set_function(lambda: len(self._table))

    def start(self) -> None:
        """Start writing to Redis."""
        if self._servers is not None:
            assert self._supervisor is not None
            self._task = self._supervisor.start("response_owners", self._write)

    async def stop(self) -> None:
        """Stop, after one attempt to write what is not written yet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                    while self._unwritten:
                        await self._write_some()

    def health(self) -> list[str]:
        """Return the problem of sharing, for `/health`."""
        if self.problem is None:
            return []
        return [f"responses that other routers made are not found ({self.problem})"]

    # -- changes, which never wait

    def made(self, response_id: str, worker: WorkerKey, caller: str) -> None:
        """Remember that a worker makes a response for a caller."""
        if USABLE_ID.fullmatch(response_id) is None:
            self._metrics.lost["unusable"].inc()
            return
        known = self._table.find(response_id)
        if known is not None and known.caller != caller:
            self._metrics.lost["taken"].inc()
            return
        sign = self._engine(worker)
        self._put(response_id, ResponseOwner(worker, caller, None if sign is None else sign.start_s))

    def counted(self, response_id: str, caller: str, conversation_tokens: int) -> None:
        """Remember the number of tokens of a conversation up to the end of a response."""
        known = self._table.find(response_id)
        if known is not None and known.caller == caller and conversation_tokens != known.conversation_tokens:
            self._put(response_id, msgspec.structs.replace(known, conversation_tokens=conversation_tokens))

    def forget(self, response_id: str) -> None:
        """Forget a response that its worker has deleted."""
        self._table.drop(response_id)
        self._change(response_id, None)

    def count_unread(self) -> None:
        """Count a response whose id could not be read."""
        self._metrics.lost["no_id"].inc()

    def _put(self, response_id: str, owner: ResponseOwner) -> None:
        forgotten = self._table.put(response_id, owner, made_here=True)
        if forgotten is not None:
            self._metrics.lost["room"].inc()
            # The deletion comes first: if too many changes wait, it is the one that makes room.
            self._change(forgotten, None)
        self._change(response_id, owner)

    def _change(self, response_id: str, owner: ResponseOwner | None) -> None:
        """Have a change written to Redis soon; while Redis is away, the oldest ones are dropped."""
        if self._servers is None:
            return
        self._unwritten[response_id] = owner
        # One new owner and one deletion for each response that this process can know.
        if len(self._unwritten) > 2 * self._max_known:
            del self._unwritten[next(iter(self._unwritten))]
            self._metrics.lost["unwritten"].inc()
        self._news.set()

    # -- lookups

    async def find(self, response_id: str, caller: str) -> ResponseOwner | None:
        """Return the owner of a caller's response, or None if there is none that this caller may know of.

        A response of another caller is looked up like one that does not exist, so that the two take equally long.

        Raises:
            UnknownResponse: The caller has no key, and the response is that of a key.
            OwnerGone: The owner no longer has the response.
            StoreDown: This process does not know the response, and Redis does not answer.
        """
        lookups, owner = self._metrics.lookups, self._table.find(response_id)
        if owner is not None and owner.caller == caller:
            return self._present(response_id, owner, "here")
        is_foreign = owner is not None
        if self._servers is not None and USABLE_ID.fullmatch(response_id) is not None:
            for pause_s in (0.0, GRACE_S):
                await asyncio.sleep(pause_s)
                shared = await self._read(response_id)
                if shared is not None and shared.caller == caller:
                    self._table.put(response_id, shared, made_here=False)
                    return self._present(response_id, shared, "shared")
                is_foreign = is_foreign or shared is not None
        lookups["foreign" if is_foreign else "unknown"].inc()
        if is_foreign and not caller:
            # Such a client comes through a gateway. An engine knows no keys, so it would give the response away.
            raise UnknownResponse(response_id)
        return None

    async def check_free(self, response_id: str, caller: str) -> None:
        """Raise Conflict if another caller has a response of this id, which the engine would overwrite.

        Raises StoreDown if this process does not know the id, and Redis does not answer.
        """
        if USABLE_ID.fullmatch(response_id) is None:
            return
        owner = self._table.find(response_id)
        if owner is None and self._servers is not None:
            owner = await self._read(response_id)
        if owner is not None and owner.caller != caller:
            raise Conflict("request_id is taken: send another one, or leave it out", code="response_id_taken")

    def _present(self, response_id: str, owner: ResponseOwner, outcome: str) -> ResponseOwner:
        """Return the owner if it still has the response. Raises OwnerGone."""
        sign, name = self._engine(owner.worker), printable(owner.worker.route_name)
        if sign is None:
            problem = f"its worker {name} is no longer registered"
        elif sign.is_down:
            problem = f"its worker {name} does not answer"
        elif None not in (sign.start_s, owner.engine_start_s) and sign.start_s != owner.engine_start_s:
            problem = f"its worker {name} was restarted"
        else:
            self._metrics.lookups[outcome].inc()
            return owner
        raise self.gone(response_id, problem)

    def gone(self, response_id: str, problem: str) -> OwnerGone:
        """Return the error that a response is gone with its worker, and count it."""
        self._metrics.lookups["gone"].inc()
        return OwnerGone(
            f"the response {printable(response_id)!r} is gone: {problem}; send the whole conversation as input, without "
            "previous_response_id"
        )

    async def _read(self, response_id: str) -> ResponseOwner | None:
        """Return the owner that Redis has. Raises StoreDown."""
        assert self._servers is not None
        key = keys.response_owner(response_id)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                (value,) = await self._servers.run(key, command("GET", key))
        except (StoreError, TimeoutError) as error:
            self._metrics.lookups["failed"].inc()
            reason = str(error) or f"no answer in {LOOKUP_TIMEOUT_S:g} s"
            raise StoreDown(
                f"this router does not know the response, and the store that other routers write to cannot be read "
                f"({reason}); send the request again"
            ) from None
        return _owner_in(value)

    # -- writing

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            try:
                await self._write_some()
            except StoreError as error:
                if self.problem is None:
                    log.warning("responses are not shared for now", extra={"reason": str(error)})
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            if self.problem is not None:
                log.info("responses are shared again")
            self.problem = None
            if not self._unwritten:
                self._news.clear()

    async def _write_some(self) -> None:
        """Write the oldest changes. Raises StoreError."""
        assert self._servers is not None
        changes = dict(list(self._unwritten.items())[:CHANGES_PER_WRITE])
        if not changes:
            return
        replies = await self._servers.run_each(*(_order(response_id, owner) for response_id, owner in changes.items()))
        taken = [
            (response_id, owner)
            for (response_id, owner), reply in zip(changes.items(), replies, strict=True)
            if owner is not None and reply is None
        ]
        for response_id, owner in taken:
            await self._write_over(response_id, owner)
        for response_id, change in changes.items():
            if self._unwritten.get(response_id, _MISSING) is change:
                del self._unwritten[response_id]

    async def _write_over(self, response_id: str, owner: ResponseOwner) -> None:
        """Replace an owner in Redis if it has the same caller, and else forget the new one. Raises StoreError."""
        assert self._servers is not None
        key = keys.response_owner(response_id)
        (value,) = await self._servers.run(key, command("GET", key))
        former = _owner_in(value)
        if former is None or former.caller == owner.caller:
            await self._servers.run(key, command("SET", key, packed(owner), "EX", TTL_S))
        elif self._table.find(response_id) == owner:
            self._metrics.lost["taken"].inc()
            self._table.drop(response_id)


_MISSING = object()


def _order(response_id: str, owner: ResponseOwner | None) -> tuple[str, bytes]:
    """Return the key of a change, and the command that writes it unless the key exists."""
    key = keys.response_owner(response_id)
    if owner is None:
        return key, command("DEL", key)
    return key, command("SET", key, packed(owner), "NX", "EX", TTL_S)


def _owner_in(value: bytes | None) -> ResponseOwner | None:
    """Return the owner in a value of Redis; None for no value, and for one that no router writes."""
    try:
        return None if value is None else unpacked(value)
    except (ValueError, msgspec.MsgspecError):
        return None
