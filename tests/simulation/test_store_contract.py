# SPDX-License-Identifier: Apache-2.0
"""The store of the simulation answers like a real server, and the comparison finds each part of it that does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvrouter.router.base.redis_client.resp import command
from tests.simulation.store import contract
from tests.simulation.store.commands import COMMANDS
from tests.simulation.store.contract import Answer, Ask, RealSide, SimulatedSide, Step, Talk, Wait
from tests.simulation.store.keyspace import Keyspace
from tests.simulation.store.node import Node, Role
from tests.simulation.store.session import Session
from tests.simulation.store.stream import NODE_BYTES, Stream
from tests.support.store_server import StoreServer

# Nodes of streams are limited by entries alone: their sizes depend on the ids, which each server makes by its clock.
OPTIONS = ("--stream-node-max-bytes", "0")
SEEDS = range(6)
SEQUENCE = 600
# The commands while none of them is broken.
WHOLE = dict(COMMANDS)

History = list[tuple[Step, list[Answer]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with StoreServer(tmp_path_factory.mktemp("store"), *OPTIONS) as server:
        yield server


@pytest.fixture
def real(server: StoreServer) -> Iterator[RealSide]:
    server.client.flushall()
    side = RealSide(server.port)
    yield side
    side.close()


def simulated() -> SimulatedSide:
    return SimulatedSide(Keyspace(node_bytes=0))


def recorded(seed: int, real: RealSide | None, commands: int = SEQUENCE) -> History:
    """Play a sequence on the simulated store, and compare each step with the real one."""
    here = simulated()
    talk, other = Talk(here), None if real is None else Talk(real)
    history: History = []
    for step in contract.steps(talk, random.Random(seed), commands):
        history.append((step, compared(step, talk, other)))
    assert here.node.copy_of_all().image() == here.node.space.image()
    return history


def compared(step: Step, talk: Talk, other: Talk | None) -> list[Answer]:
    """Take a step on both sides, and return the equal answers."""
    answers = talk.play(step)
    if other is not None:
        assert other.play(step, answers) == answers, step
    return answers


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_get_equal_answers(real: RealSide, seed: int) -> None:
    recorded(seed, real)


def _fill(here: Node, there: RealSide, begins: bool) -> None:
    here.is_full = begins
    there.ask("CONFIG", "SET", "maxmemory", int(begins))


def _demote(here: Node, there: RealSide, begins: bool) -> None:
    here.role = Role.REPLICA if begins else Role.PRIMARY
    here.space.is_replica = begins
    there.ask("REPLICAOF", *(("127.0.0.1", 1) if begins else ("NO", "ONE")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("change", [_fill, _demote])
def test_server_without_memory_and_replica_refuse_the_same_commands(
    real: RealSide, change: Callable[[Node, RealSide, bool], None], seed: int
) -> None:
    here = simulated()
    talk, other = Talk(here), Talk(real)
    is_changed, refused = False, 0
    for number, step in enumerate(contract.steps(talk, random.Random(seed), SEQUENCE)):
        # A server that becomes a replica breaks the connections that wait.
        if is_changed != (SEQUENCE // 3 < number < SEQUENCE) and (is_changed or not talk.blocked):
            is_changed = not is_changed
            change(here.node, real, is_changed)
        # A real server's deadlines move by commands, which it refuses now.
        if not (is_changed and isinstance(step, Wait)):
            refused += any(
                str(part).startswith(("error OOM", "error READONLY")) for _, part in compared(step, talk, other)
            )
    assert refused


def test_replica_ends_the_reads_that_wait(real: RealSide) -> None:
    here = simulated()
    for side in (here, real):
        side.send(0, command("XREAD", "BLOCK", 0, "STREAMS", "x1", "0-0"))
    here.node.follow(simulated().node)
    real.ask("REPLICAOF", "127.0.0.1", 1)
    try:
        assert str(here.receive(0)) == str(real.receive(0))
        assert here.receive(0) is real.receive(0) is False
    finally:
        real.ask("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize("seed", SEEDS)
def test_trim_keeps_the_same_entries_with_nodes_limited_by_bytes(
    server: StoreServer, real: RealSide, seed: int
) -> None:
    rng = random.Random(seed)
    server.client.config_set("stream-node-max-bytes", NODE_BYTES)
    try:
        talk, other = Talk(SimulatedSide(Keyspace())), Talk(real)
        milliseconds = 1
        for _ in range(250):
            milliseconds += rng.choice((1, 1, 1, 100, 5_000, 10**7, 10**12))
            names = rng.choice(((b"f",), (b"f",), (b"f",), (b"g", b"5"), (b"12345", b"name")))
            fields = [part for name in names for part in (name, _text(rng))]
            added = Ask(
                0, (b"XADD", b"x1", b"MAXLEN", b"~", b"20", b"%d-%d" % (milliseconds, rng.randrange(300)), *fields)
            )
            compared(added, talk, other)
            compared(Ask(0, (b"XREVRANGE", b"x1", b"+", b"-", b"COUNT", b"1000")), talk, other)
    finally:
        server.client.config_set("stream-node-max-bytes", 0)


def _text(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return b"%d" % rng.choice((0, 127, 128, -1, 4_095, 4_096, -4_097, 2**15, 2**23, -(2**31), 2**40, 2**63, 10**20))
    return bytes(rng.choice((0, 1, 63, 64, 120, 127, 500, 1_500, 4_095, 4_096, 5_000)))


def _pass_deadline(side: SimulatedSide | RealSide, deadline_ms: int) -> None:
    """Wait until the server's clock is past the deadline, without a look at any key."""
    if isinstance(side, SimulatedSide):
        side.now_s = deadline_ms / 1_000 + 1.0
        return
    while True:
        seconds, micros = side.ask("TIME")
        if int(seconds) * 1_000 + int(micros) // 1_000 > deadline_ms:
            return


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_real", [False, True])
def test_watched_key_that_expires_ends_the_transaction(
    real: RealSide, is_real: bool, is_late: bool, is_seen: bool
) -> None:
    """`is_late`: the key has expired before WATCH. `is_seen`: another connection meets the expired key."""
    side: SimulatedSide | RealSide = real if is_real else simulated()

    def ask(connection: int, *words: str | bytes | int) -> Any:
        side.send(connection, command(*words))
        return side.receive(connection)

    while True:
        seconds, micros = ask(0, "TIME")
        deadline_ms = int(seconds) * 1_000 + int(micros) // 1_000 + 50
        ask(0, "SET", "k", "v")
        ask(0, "PEXPIREAT", "k", deadline_ms)
        if is_late:
            _pass_deadline(side, deadline_ms)
        ask(0, "WATCH", "k")
        # A machine that was busy for too long tries again.
        if is_late or ask(0, "PTTL", "k") > 0:
            break
        ask(0, "UNWATCH")
    _pass_deadline(side, deadline_ms)
    if is_seen:
        assert ask(1, "EXISTS", "k") == 0
    ask(0, "MULTI")
    ask(0, "SET", "done", "1")
    assert ask(0, "EXEC") == ([b"OK"] if is_late else None)


@pytest.fixture(scope="module")
def histories() -> list[History]:
    """Return the sequences, as the store answers them."""
    return [recorded(seed, None) for seed in SEEDS]


def test_all_commands_of_the_store_are_compared(histories: list[History]) -> None:
    sent = {step.words[0] for history in histories for step, _ in history if isinstance(step, Ask)}
    # PEXPIRE stands in for time on the real server, and PEXPIREAT is a deadline on a replica.
    assert {*COMMANDS} - sent == {b"PEXPIRE", b"PEXPIREAT"}
    assert sent - {*COMMANDS} == {b"MULTI", b"EXEC", b"DISCARD", b"WATCH", b"UNWATCH"}


def _always(reply: Any) -> Callable[[Any, Any], Any]:
    return lambda space, words: reply


def _without(name: bytes, part: int) -> Callable[[Any, Any], Any]:
    """Return the command without one of its words."""
    return lambda space, words: WHOLE[name].execute(space, (*words[:part], *words[part + 1 :]))


def _ends_deadline(space: Any, words: Any) -> Any:
    reply = WHOLE[b"HSET"].execute(space, words)
    space.deadlines.pop(words[1], None)
    return reply


def _keeps_deadline(space: Any, words: Any) -> Any:
    deadline = space.deadlines.get(words[1])
    reply = WHOLE[b"SET"].execute(space, words)
    if reply is not None and deadline is not None:
        space.deadlines.setdefault(words[1], deadline)
    return reply


def _keeps_empty(space: Any, words: Any) -> Any:
    reply = WHOLE[b"HDEL"].execute(space, words)
    if reply and words[1] not in space.values:
        space.values[words[1]] = {}
    return reply


# A way to break each family of commands.
BROKEN_COMMANDS: dict[str, tuple[bytes, Callable[[Any, Any], Any]]] = {
    "DEL counts too few": (b"DEL", _always(0)),
    "UNLINK drops one key alone": (b"UNLINK", _without(b"UNLINK", 2)),
    "TYPE of a SET": (b"TYPE", lambda space, words: _swap(WHOLE[b"TYPE"].execute(space, words), b"set", b"hash")),
    "EXPIRE in milliseconds": (b"EXPIRE", WHOLE[b"PEXPIRE"].execute),
    "PTTL of a key without deadline": (b"PTTL", lambda space, words: max(-1, WHOLE[b"PTTL"].execute(space, words))),
    "SCAN without MATCH": (b"SCAN", lambda space, words: WHOLE[b"SCAN"].execute(space, words[:2] + words[4:])),
    "SET keeps a deadline": (b"SET", _keeps_deadline),
    "INCR by two": (b"INCR", lambda space, words: WHOLE[b"INCRBY"].execute(space, (*words, b"2"))),
    "HSET ends a deadline": (b"HSET", _ends_deadline),
    "HDEL leaves an empty HASH": (b"HDEL", _keeps_empty),
    "HSETNX replaces": (b"HSETNX", WHOLE[b"HSET"].execute),
    "HMGET ends early": (b"HMGET", _without(b"HMGET", 4)),
    "SADD counts all": (b"SADD", lambda space, words: WHOLE[b"SADD"].execute(space, words) and len(words) - 2),
    "SREM drops one member alone": (b"SREM", _without(b"SREM", 4)),
    "XREVRANGE from the start": (
        b"XREVRANGE",
        lambda space, words: _reversed(WHOLE[b"XREVRANGE"].execute(space, words)),
    ),
    "XTRIM never trims": (b"XTRIM", _always(0)),
}


def _swap(reply: Any, before: bytes, after: bytes) -> Any:
    return type(reply)(after) if reply == before else reply


def _reversed(reply: Any) -> Any:
    return reply[::-1] if isinstance(reply, list) else reply


def _trim_exactly(stream: Stream, length: int) -> int:
    surplus = max(0, len(stream.entries) - length)
    del stream.entries[:surplus]
    return surplus


def _next_id_of_clock(stream: Stream, now_ms: int) -> tuple[int, int]:
    return now_ms + 1, 0


def _read_from(stream: Stream, entry_id: tuple[int, int], count: int | None) -> list[Any]:
    return [entry for entry in stream.entries if entry[0] >= entry_id][:count]


# A way to break each part beside the commands: its owner, its name, what stands in its place.
BROKEN_PARTS: dict[str, tuple[type, str, Any]] = {
    "a trim that is exact": (Stream, "trim_length", _trim_exactly),
    "a read that repeats the entry it was at": (Stream, "after", _read_from),
    "a WATCH that sees nothing": (Node, "_touched", lambda node, key: None),
    "a WATCH that lasts beyond EXEC": (Session, "_unwatch", lambda session: None),
    "a read that is not woken": (Session, "look_again", lambda session: None),
    "keys that never expire": (Keyspace, "find", lambda space, key: space.values.get(key)),
    "a stream of another type": (Keyspace, "stream", lambda space, key: None),
    "a STRING of another type": (Keyspace, "text", lambda space, key: None),
    "a HASH of another type": (Keyspace, "fields", lambda space, key: {}),
    "too few words": (Session, "_check", lambda session, name, order, words: None),
}


def notices(history: History) -> bool:
    """Return whether a changed store answers a step of the history differently, or fails."""
    talk = Talk(simulated())
    try:
        return any(talk.play(step, answers) != answers for step, answers in history)
    except (AttributeError, IndexError, TypeError, ValueError):
        return True


@pytest.mark.parametrize("name", [*BROKEN_COMMANDS, *BROKEN_PARTS])
def test_broken_part_is_noticed(name: str, histories: list[History], monkeypatch: pytest.MonkeyPatch) -> None:
    if name in BROKEN_COMMANDS:
        order, execute = BROKEN_COMMANDS[name]
        monkeypatch.setitem(COMMANDS, order, WHOLE[order]._replace(execute=execute))
    else:
        monkeypatch.setattr(*BROKEN_PARTS[name])
    assert any(notices(history) for history in histories)
