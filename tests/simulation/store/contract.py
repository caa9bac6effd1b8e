# SPDX-License-Identifier: Apache-2.0
"""Random sequences of the commands that routers send, for two servers that must answer alike: the store and a real one.

Some answers differ between equal servers, and are compared by what they mean: ids that a server makes by its clock are
numbered in the order of their making, members and fields are sorted, and the time that a key has left is rounded.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import hiredis

from kvrouter.router.base.redis_client.resp import command
from tests.simulation.store.keyspace import Keyspace
from tests.simulation.store.node import Node
from tests.simulation.store.session import Session

# Connections of one sequence; the last one only prepares and ends it.
CONNECTIONS = 4
ADMIN = CONNECTIONS - 1
# All times are multiples of this, so that the seconds that a real server takes do not count.
UNIT_S = 1_000_000
BEGIN_S = 1_795_000_000
# A real server answers at once, but a busy machine may not let it.
REPLY_TIMEOUT_S = 120.0
# No two requests come in one millisecond, so that ids order the entries of all streams alike on both sides.
MOMENT_S, MOMENT_NS = 0.001, 1_000_000


class Ref(NamedTuple):
    """The id that a server made for the entry of this number."""

    number: int


class Ask(NamedTuple):
    """One command on one connection."""

    connection: int
    words: tuple[bytes | Ref, ...]


class Wait(NamedTuple):
    """Time that passes, in units."""

    units: int


Step = Ask | Wait
# The connection and the meaning of a reply.
Answer = tuple[int, Any]


class Side(Protocol):
    """A server under comparison."""

    def send(self, connection: int, data: bytes) -> None: ...

    def receive(self, connection: int) -> Any:
        """Return the next reply, `False` if none comes."""

    def wait(self, units: int) -> None: ...


class SimulatedSide:
    """The simulation's store, without a network."""

    def __init__(self, space: Keyspace) -> None:
        self.now_s = float(BEGIN_S)
        self.node = Node(space, clock=lambda: self.now_s, rng=random.Random(0))
        self._sessions = [Session(self.node, str(number)) for number in range(CONNECTIONS)]
        self._readers = [hiredis.Reader() for _ in range(CONNECTIONS)]

    def send(self, connection: int, data: bytes) -> None:
        self.now_s += MOMENT_S
        self._readers[connection].feed(self._sessions[connection].ask(data))

    def receive(self, connection: int) -> Any:
        self._readers[connection].feed(self._sessions[connection].ask(b""))
        return self._readers[connection].gets()

    def wait(self, units: int) -> None:
        self.now_s += units * UNIT_S


class RealSide:
    """A real server."""

    def __init__(self, port: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        self._readers = [hiredis.Reader() for _ in range(CONNECTIONS)]
        for link in self._sockets:
            link.settimeout(REPLY_TIMEOUT_S)

    def close(self) -> None:
        for link in self._sockets:
            link.close()

    def send(self, connection: int, data: bytes) -> None:
        last = time.time_ns() // MOMENT_NS
        while time.time_ns() // MOMENT_NS == last:
            pass
        self._sockets[connection].sendall(data)

    def receive(self, connection: int) -> Any:
        reader = self._readers[connection]
        while (reply := reader.gets()) is False:
            try:
                data = self._sockets[connection].recv(65_536)
            except TimeoutError:
                return False
            if not data:
                return False
            reader.feed(data)
        return reply

    def ask(self, *words: str | bytes | int) -> Any:
        self.send(ADMIN, command(*words))
        return self.receive(ADMIN)

    def wait(self, units: int) -> None:
        """Bring all deadlines nearer. Keys that are due expire, which takes the server some milliseconds."""
        due = []
        for key in sorted(self.ask("SCAN", "0", "COUNT", "100000")[1]):
            left_ms = self.ask("PTTL", key)
            if left_ms < 0:
                continue
            left_ms -= units * UNIT_S * 1_000
            if left_ms > 0:
                self.ask("PEXPIRE", key, left_ms)
            else:
                self.ask("PEXPIRE", key, 1)
                due.append(key)
        for key in due:
            while self.ask("EXISTS", key):
                pass


class Talk:
    """A sequence of steps on one side, with what its answers mean."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._ids: dict[bytes, Ref] = {}
        self._by_number: list[bytes] = []
        self._queued: list[list[tuple[bytes, ...]] | None] = [None] * CONNECTIONS
        # The commands without an answer so far, by connection.
        self._open: dict[int, tuple[bytes, ...]] = {}

    @property
    def blocked(self) -> set[int]:
        """The connections that wait."""
        return {*self._open}

    def play(self, step: Step, expected: Sequence[Answer] | None = None) -> list[Answer]:
        """Take one step, and return the answers that are there after it.

        Args:
            step: The step.
            expected: The answers of the other side: those of these connections are awaited. Without it, no answer needs
                to be awaited.
        """
        if isinstance(step, Wait):
            self._side.wait(step.units)
            return []
        words = tuple(self._by_number[word.number] if isinstance(word, Ref) else word for word in step.words)
        self._open[step.connection] = words
        self._side.send(step.connection, command(*words))
        order = [step.connection, *sorted(self.blocked - {step.connection})]
        due = order if expected is None else [connection for connection, _ in expected]
        answers = []
        for connection in due:
            reply = self._side.receive(connection)
            if reply is not False or expected is not None:
                answers.append((connection, self._meaning_on(connection, reply)))
        return answers

    def _meaning_on(self, connection: int, reply: Any) -> Any:
        words = self._open.pop(connection, (b"",))
        name = words[0].upper()
        queued = self._queued[connection]
        if name == b"MULTI" and queued is None:
            self._queued[connection] = []
        elif name in (b"EXEC", b"DISCARD"):
            self._queued[connection] = None
            if name == b"EXEC" and isinstance(reply, list) and queued is not None:
                return [self._meaning(order, part) for order, part in zip(queued, reply, strict=True)]
        elif queued is not None and reply == b"QUEUED":
            queued.append(words)
            return reply
        return self._meaning(words, reply)

    def _meaning(self, words: tuple[bytes, ...], reply: Any) -> Any:
        if isinstance(reply, hiredis.ReplyError):
            return f"error {reply}"
        if reply is None or reply is False:
            return reply
        match words[0].upper():
            case b"HGETALL":
                return sorted(zip(reply[::2], reply[1::2], strict=True))
            case b"SMEMBERS":
                return sorted(reply)
            case b"SCAN":
                return sorted(reply[1])
            case b"PTTL" if reply > 0:
                return round(reply / 1_000 / UNIT_S, 1)
            case b"XADD":
                # Ids of the sequence itself are small.
                if b"*" in words and reply not in self._ids:
                    self._ids[reply] = Ref(len(self._by_number))
                    self._by_number.append(reply)
                return self._ids.get(reply, reply)
            case b"XREVRANGE":
                return self._entries(reply)
            case b"XREAD":
                return [(key, self._entries(entries)) for key, entries in reply]
        return reply

    def _entries(self, entries: Any) -> list[Any]:
        return [(self._ids.get(entry_id, entry_id), fields) for entry_id, fields in entries]

    @property
    def made_ids(self) -> int:
        """How many ids the server made."""
        return len(self._by_number)

    def queues(self, connection: int) -> bool:
        """Whether the connection is between MULTI and EXEC."""
        return self._queued[connection] is not None


FAMILIES = ("keys", "strings", "hashes", "sets", "streams")
_NUMBERS = (
    b"0",
    b"1",
    b"-3",
    b"7",
    b"01",
    b" 1",
    b"",
    b"x",
    b"1.5",
    b"-0",
    b"9223372036854775807",
    b"-9223372036854775808",
)
_TEXTS = (*_NUMBERS, b"v", b"long" * 40, b"\0\xff\r\n")
_NAMES = (b"f", b"g", b"h\r\n", b"")
_POOL = {
    "strings": (b"s1", b"s2"),
    "hashes": (b"h1", b"h2"),
    "sets": (b"m1", b"m2"),
    "streams": (b"x1", b"x2", b"x3"),
}
_ALL_KEYS = (*(key for keys in _POOL.values() for key in keys), b"none")


class Chooser:
    """The random choice of commands."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def command(self, made_ids: int, *, blocks: bool = False) -> tuple[bytes | Ref, ...]:
        """Return a command of any family."""
        family = self._rng.choice(FAMILIES)
        if self._rng.random() < 0.06:
            # Each type keeps its deadline through its own commands.
            key = self.key(family)
            return self._rng.choice(((b"EXPIRE", key, b"%d" % (2 * UNIT_S)), (b"PTTL", key), (b"PTTL", key)))
        words = self._of(family, made_ids, blocks=blocks)
        if self._rng.random() < 0.02:
            # Too few words.
            return words[:1]
        return words

    def key(self, family: str) -> bytes:
        """Return a key of the family, or sometimes of another one."""
        return self._rng.choice(_ALL_KEYS if family == "keys" or self._rng.random() < 0.08 else _POOL[family])

    def _of(self, family: str, made_ids: int, *, blocks: bool) -> tuple[bytes | Ref, ...]:
        rng, key = self._rng, self.key(family)
        name, text, number = rng.choice(_NAMES), rng.choice(_TEXTS), rng.choice(_NUMBERS)
        seconds = b"%d" % (rng.randint(1, 4) * UNIT_S)
        match family:
            case "keys":
                return rng.choice(
                    (
                        *((order, key) for order in (b"DEL", b"TYPE", b"EXISTS", b"PTTL", b"TYPE", b"PTTL")),
                        (b"UNLINK", key, self.key("keys")),
                        (b"EXPIRE", key, rng.choice((seconds, seconds, seconds, b"0", b"-1", b"x"))),
                        (
                            b"SCAN",
                            b"0",
                            b"MATCH",
                            rng.choice((b"*", b"x*", b"?1", b"h\\1")),
                            b"COUNT",
                            b"1000",
                        ),
                    )
                )
            case "strings":
                timing = rng.choice(((), (), (b"EX", seconds), (b"PX", seconds + b"000"), (b"EX", b"0"), (b"PX", b"x")))
                return rng.choice(
                    (
                        (b"GET", key),
                        (b"SET", key, text, *timing),
                        (b"SET", key, number),
                        (b"SET", key, text, b"NX", *timing),
                        (b"INCR", key),
                        (b"INCRBY", key, number),
                    )
                )
            case "hashes":
                return rng.choice(
                    (
                        (b"HSET", key, name, text),
                        (b"HSET", key, name, number, rng.choice(_NAMES), text),
                        (b"HSET", key, name, text, rng.choice(_NAMES)),
                        (b"HSETNX", key, name, text),
                        (b"HGET", key, name),
                        (b"HMGET", key, name, rng.choice(_NAMES), b"absent"),
                        (b"HGETALL", key),
                        (b"HLEN", key),
                        (b"HDEL", key, name, rng.choice(_NAMES)),
                        (b"HDEL", key, *_NAMES),
                        (b"HINCRBY", key, name, number),
                    )
                )
            case "sets":
                return rng.choice(
                    (
                        (b"SADD", key, text, rng.choice(_TEXTS)),
                        (b"SREM", key, *rng.sample(_TEXTS, 3)),
                        (b"SMEMBERS", key),
                    )
                )
        return self._of_stream(key, made_ids, blocks=blocks)

    def _of_stream(self, key: bytes, made_ids: int, *, blocks: bool) -> tuple[bytes | Ref, ...]:
        rng = self._rng
        fields = [part for _ in range(rng.randint(1, 3)) for part in (rng.choice(_NAMES), rng.choice(_TEXTS))]
        count = rng.choice((b"1", b"2", b"10", b"0", b"-1", b"x"))
        length = rng.choice((b"1", b"3", b"20", b"150", b"0", b"-1"))
        others = rng.sample(_POOL["streams"], rng.randint(0, 2))
        names = [key, *(name for name in others if name != key)]
        blocking = (b"BLOCK", b"0") if blocks else ()
        return rng.choice(
            (
                (b"XADD", key, b"*", *fields),
                (b"XADD", key, b"*", *fields),
                (b"XADD", key, b"MAXLEN", b"~", length, b"*", *fields),
                (b"XADD", key, b"MAXLEN", b"~", length, b"*", *fields),
                (b"XADD", key, b"*", *fields, b"odd"),
                (b"XADD", key, rng.choice((b"0-0", b"0-1", b"5-1", b"7", b"x")), *fields),
                (b"XTRIM", key, b"MINID", b"~", self._id(made_ids)),
                (b"XREVRANGE", key, b"+", b"-", b"COUNT", count),
                (b"XREVRANGE", key, self._id(made_ids), self._id(made_ids)),
                (b"XREAD", b"COUNT", count, *blocking, b"STREAMS", *names, *(self._id(made_ids) for _ in names)),
                (b"XREAD", b"COUNT", count, *blocking, b"STREAMS", *names, *(self._id(made_ids) for _ in names)),
                (b"XREAD", *blocking, b"STREAMS", *names, *(self._id(made_ids) for _ in names[1:])),
            )
        )

    def _id(self, made_ids: int) -> bytes | Ref:
        if made_ids and self._rng.random() < 0.6:
            # Mostly one of the last entries.
            return Ref(max(0, made_ids - 1 - int(self._rng.expovariate(0.2))))
        return self._rng.choice((b"0-0", b"0", b"5-1", b"18446744073709551615-18446744073709551615", b"x", b"1-x"))


def steps(talk: Talk, rng: random.Random, commands: int) -> Iterator[Step]:
    """Yield the steps of one sequence; the answers on `talk`, the side that leads, show what can be sent next."""
    chooser = Chooser(rng)
    watching: set[int] = set()
    for _ in range(commands):
        free = [number for number in range(ADMIN) if number not in talk.blocked]
        if not free:
            # News for all that wait.
            yield Ask(ADMIN, (b"FLUSHALL",))
            for key in _POOL["streams"]:
                yield Ask(ADMIN, (b"XADD", key, b"*", b"f", b"v"))
            continue
        connection = rng.choice(free)
        draw = rng.random()
        if draw < 0.06:
            queues = talk.queues(connection)
            name = rng.choice(
                (b"EXEC", b"EXEC", b"DISCARD") if queues else (b"MULTI", b"MULTI", b"WATCH", b"UNWATCH", b"EXEC")
            )
            if name == b"WATCH":
                watching.add(connection)
                yield Ask(connection, (name, *(chooser.key("keys") for _ in range(2))))
                continue
            if name != b"MULTI":
                watching.discard(connection)
            yield Ask(connection, (name,))
        elif draw < 0.07 and not watching:
            # A real server's deadlines are brought nearer by commands, which would touch what is watched.
            yield Wait(rng.randint(1, 2))
        elif draw < 0.075:
            key = rng.choice(_POOL["streams"])
            for _ in range(120):
                yield Ask(connection, (b"XADD", key, b"MAXLEN", b"~", b"150", b"*", b"f", b"v"))
                if connection in talk.blocked:
                    break
        else:
            yield Ask(connection, chooser.command(talk.made_ids, blocks=rng.random() < 0.2))
    # Requests that still wait get all news, and only those.
    yield Ask(ADMIN, (b"FLUSHALL",))
    for key in _POOL["streams"]:
        yield Ask(ADMIN, (b"XADD", key, b"*", b"last", b"v"))
    for connection in range(ADMIN):
        if connection not in talk.blocked:
            yield Ask(connection, (b"DISCARD",))
