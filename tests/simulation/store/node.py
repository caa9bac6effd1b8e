# SPDX-License-Identifier: Apache-2.0
"""One server of the store: executes commands in order, and keeps a copy of its keys that is some writes behind.

The copy executes what `Keyspace.effects` notes. It is what a crash, or a failover to a replica, leaves of the data.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from tests.simulation.store.commands import COMMANDS, OK, NotBuilt, Order, Reply, Status
from tests.simulation.store.keyspace import Command, Expired, Keyspace, ReplyError
from tests.simulation.store.session import Session
from tests.simulation.store.stream import Stream

# Writes that a crash can lose at most; the copy executes earlier ones, in portions.
KEPT_WRITES = 1_024
# Called with the client and the effects of each write that changed a key. The client is "" for what the store itself
# does: faults, and deadlines that pass.
Observer = Callable[[str, Sequence[Command]], None]

NO_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."
READ_ONLY = "READONLY You can't write against a read only replica."
LOADING = "LOADING Valkey is loading the dataset in memory"
NO_DISK = "MISCONF Errors writing to the AOF file: No space left on device"
DEMOTED = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)"
_TOTAL_BYTES = 64 * 1024**3
_LIMIT_BYTES = 1024**3
# For INFO, each key counts as this much.
_KEY_BYTES = 256
_VERSION = "9.1.2"
# The answer of a server that loads its data.
_WHILE_LOADING = frozenset({b"INFO", b"CONFIG", b"SELECT", b"CLIENT", b"TIME", b"ROLE"})


class Role(Enum):
    """The role of a node for its clients."""

    PRIMARY = "master"
    REPLICA = "slave"


class Node:
    """One server."""

    def __init__(self, space: Keyspace, *, clock: Callable[[], float], rng: random.Random) -> None:
        """Serve the keys of `space`.

        Args:
            space: The keys.
            clock: Returns the server's time, in seconds since 1970.
            rng: Chooses the keys that are evicted.
        """
        self._clock = clock
        self._rng = rng
        self.space = space
        self._copy = space.copy()
        self._behind: deque[Sequence[Command]] = deque()
        self.observers: list[Observer] = []
        # The primary of a replica.
        self._primary: Node | None = None
        # Connections, in order of their beginning.
        self.sessions: dict[Session, None] = {}
        self.watchers: dict[bytes, dict[Session, None]] = {}
        self.waiting: dict[Session, frozenset[bytes]] = {}
        # Its state
        self.role = Role.PRIMARY
        self.policy = "noeviction"
        self.is_full = False
        self.is_disk_full = False
        self.is_loading = False
        self.is_stopped = False
        self.evicted = 0
        self.executed = 0
        space.touched = self._touched

    # -- commands

    def check(self, order: Order) -> None:
        """Raise ReplyError if this server refuses the command now."""
        if self.is_full and not self._evict() and order.grows:
            raise ReplyError(NO_MEMORY)
        if self.is_disk_full and order.writes and self.role is Role.PRIMARY:
            raise ReplyError(NO_DISK)
        if order.writes and self.role is Role.REPLICA:
            raise ReplyError(READ_ONLY)
        if self.is_loading:
            raise ReplyError(LOADING)

    def execute(self, order: Order, words: Command) -> Reply:
        """Execute one command; its effects count after `finish`."""
        self.executed += 1
        self.space.now_ms = self.now_ms()
        try:
            return order.execute(self.space, words)
        except ReplyError as error:
            return error

    def look(self, key: bytes) -> None:
        """Delete the key if it has expired."""
        self.space.now_ms = self.now_ms()
        self.space.find(key)

    def finish(self, client: str) -> None:
        """End a command or a transaction of `client`: its effects go on to the copy, and waiting reads see them."""
        effects = self.space.effects
        if not effects:
            return
        self.space.effects = []
        self._behind.append(effects)
        if len(self._behind) > 2 * KEPT_WRITES:
            self._catch_up(KEPT_WRITES)
        expired = [effect for effect in effects if isinstance(effect, Expired)]
        caused = [effect for effect in effects if not isinstance(effect, Expired)] if expired else effects
        for observer in self.observers:
            # Time stands still within a command, so that what has expired is gone before the rest.
            if expired:
                observer("", expired)
            if caused:
                observer(client, caused)
        self._tell_news()

    def _tell_news(self) -> None:
        if not self.space.news:
            return
        news, self.space.news = self.space.news, {}
        grown = {key for key in news if isinstance(self.space.values.get(key), Stream)}
        for session in [session for session, keys in self.waiting.items() if keys & grown]:
            # An earlier one may have ended it.
            if session in self.waiting:
                session.look_again()

    def _touched(self, key: bytes) -> None:
        for session in self.watchers.get(key, ()):
            session.is_dirty = True

    def now_ms(self) -> int:
        return int(self._clock() * 1_000)

    # -- commands about the server

    def service(self, name: bytes, words: Command) -> Reply:
        """Execute a command that is about the server or the connection."""
        if self.is_loading and name not in _WHILE_LOADING:
            raise ReplyError(LOADING)
        match name:
            case b"PING":
                return Status(b"PONG")
            case b"SELECT" if words[1] == b"0":
                return OK
            case b"CLIENT" if words[1].upper() in (b"SETNAME", b"SETINFO"):
                return OK
            case b"TIME":
                micros = round(self._clock() * 1_000_000)
                return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]
            case b"INFO":
                return self._info()
            case b"CONFIG" if words[1].upper() == b"GET" and len(words) == 3:
                value = self._settings().get(words[2].decode().lower())
                return [] if value is None else [words[2], value.encode()]
            case b"ROLE":
                return [self.role.value.encode(), 0, []]
        raise NotBuilt(words)

    def _settings(self) -> dict[str, str]:
        return {"save": "", "dir": "/data", "appendonly": "yes", "maxmemory-policy": self.policy}

    def _info(self) -> bytes:
        sections: dict[str, dict[str, object]] = {
            "Server": {"redis_version": "7.2.4", "valkey_version": _VERSION, "process_id": 1},
            "Memory": {
                "used_memory": _LIMIT_BYTES if self.is_full else _KEY_BYTES * len(self.space.values),
                "total_system_memory": _TOTAL_BYTES,
                "maxmemory": _LIMIT_BYTES,
                "maxmemory_policy": self.policy,
            },
            "Persistence": {
                "loading": int(self.is_loading),
                "rdb_last_bgsave_status": "ok",
                "aof_enabled": 1,
                "aof_last_bgrewrite_status": "ok",
                "aof_last_write_status": "err" if self.is_disk_full else "ok",
            },
            "Stats": {"expired_keys": self.space.expired, "evicted_keys": self.evicted},
            "Replication": {"role": self.role.value},
            "Cluster": {"cluster_enabled": 0},
        }
        lines = [
            line
            for section, fields in sections.items()
            for line in (f"# {section}", *(f"{name}:{value}" for name, value in fields.items()), "")
        ]
        return "\r\n".join(lines).encode()

    # -- faults

    def lasting(self, lose_last: int) -> Keyspace:
        """Return the keys as they were before the last `lose_last` writes, and forget what came after."""
        if lose_last > len(self._behind) and lose_last > KEPT_WRITES:
            raise ValueError(f"a crash loses at most {KEPT_WRITES} writes")
        self._catch_up(max(0, len(self._behind) - lose_last))
        self._behind.clear()
        return self._copy.copy()

    def copy_of_all(self) -> Keyspace:
        """Return the copy as it will be once it has executed all effects: it must equal `space`."""
        twin = self._copy.copy()
        for effects in self._behind:
            replay(effects, twin)
        return twin

    def _catch_up(self, writes: int) -> None:
        for _ in range(writes):
            replay(self._behind.popleft(), self._copy)
        self._copy.news.clear()

    @contextmanager
    def changing(self) -> Iterator[Keyspace]:
        """Give the keys for a change by the store itself."""
        self.space.now_ms = self.now_ms()
        yield self.space
        self.finish("")

    def evict(self, count: int) -> list[bytes]:
        """Drop `count` keys that the policy lets go, and return their names."""
        with self.changing() as space:
            candidates = [key for key in space.values if key in space.deadlines or "volatile" not in self.policy]
            gone = self._rng.sample(candidates, min(count, len(candidates)))
            for key in gone:
                space.drop(key)
        self.evicted += len(gone)
        return gone

    def _evict(self) -> bool:
        """Make room for one command, if the policy allows it."""
        return self.policy != "noeviction" and bool(self.evict(1))

    def follow(self, primary: Node) -> None:
        """Become a replica of `primary`: writes are refused, and connections that wait for news end."""
        self.role = Role.REPLICA
        for key in self.space.values:
            self._touched(key)
        self.space = primary.space.copy()
        self.space.is_replica = True
        self.space.touched = self._touched
        if self._primary is not None:
            self._primary.observers.remove(self._take)
        self._primary = primary
        primary.observers.append(self._take)
        for session in list(self.waiting):
            session.refuse_wait(DEMOTED)
            session.end(reset=True)

    def finish_loading(self) -> None:
        """Serve the data, which is loaded."""
        self.is_loading = False

    def _take(self, client: str, effects: Sequence[Command]) -> None:
        self.space.now_ms = -1
        replay(effects, self.space)
        self._tell_news()

    def resume(self) -> None:
        """Go on after `is_stopped`."""
        self.is_stopped = False
        for session in list(self.sessions):
            session.resume()

    def end(self) -> None:
        """Break all connections."""
        for session in list(self.sessions):
            session.end(reset=True)


def replay(effects: Sequence[Command], space: Keyspace) -> None:
    """Execute effects on another server's keys."""
    for words in effects:
        COMMANDS[words[0].upper()].execute(space, words)
    space.effects.clear()
