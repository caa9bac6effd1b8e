# SPDX-License-Identifier: Apache-2.0
"""The server's side of one connection: reads commands, keeps WATCH and MULTI, and waits for an XREAD that blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import hiredis

from tests.simulation.store.commands import (
    COMMANDS,
    NULL_ARRAY,
    OK,
    NotBuilt,
    NullArray,
    Order,
    Reply,
    Status,
    read_request,
)
from tests.simulation.store.keyspace import Command, ReplyError

if TYPE_CHECKING:
    from tests.simulation.store.node import Node

ABORTED = "EXECABORT Transaction discarded because of previous errors."


class Session(asyncio.Protocol):
    """One client's connection to a node. It can be used without a transport: `ask` returns the replies."""

    def __init__(self, node: Node, client: str) -> None:
        self.node = node
        self.client = client
        self._reader = hiredis.Reader()
        self._transport: asyncio.WriteTransport | None = None
        self._out: list[bytes] = []
        # The commands since MULTI, None outside; whether one was refused; whether a watched key changed.
        self._queued: list[Command] | None = None
        self._is_refused = False
        self.is_dirty = False
        self.watched: dict[bytes, None] = {}
        # The XREAD that waits, and the end of its wait.
        self._waiting: Command | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_overdue = False
        node.sessions[self] = None

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._process()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.end()

    def end(self, *, reset: bool = False) -> None:
        """Forget the session; with `reset`, its connection breaks too."""
        self._stop_waiting()
        self._unwatch()
        self._queued = None
        self.node.sessions.pop(self, None)
        if reset and self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()

    def ask(self, data: bytes) -> bytes:
        """Take bytes as from a connection, and return the replies that are there."""
        self.data_received(data)
        replies, self._out = b"".join(self._out), []
        return replies

    def _process(self) -> None:
        while self._waiting is None and self in self.node.sessions and not self.node.is_stopped:
            words = self._reader.gets()
            if words is False:
                break
            self._answer(self._reply(tuple(words)))
        self._flush()

    def resume(self) -> None:
        """Go on with commands that came while the server was stopped."""
        if self._is_overdue:
            self._give_up()
        elif self._waiting is None:
            self._process()

    def _answer(self, reply: Reply) -> None:
        if self._waiting is None:
            encode(reply, self._out)

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            data, self._out = b"".join(self._out), []
            self._transport.write(data)

    # -- commands

    def _reply(self, words: Command) -> Reply:
        name = words[0].upper()
        order = COMMANDS.get(name)
        try:
            if order is None:
                return self._service(name, words)
            self._check(name, order, words)
        except ReplyError as error:
            self._is_refused = True
            return error
        if self._queued is not None:
            self._queued.append(words)
            return Status(b"QUEUED")
        reply = self.node.execute(order, words)
        if name == b"XREAD" and reply is NULL_ARRAY and (wait_ms := read_request(words).block_ms) is not None:
            self._wait(words, wait_ms)
        self.node.finish(self.client)
        return reply

    def _check(self, name: bytes, order: Order, words: Command) -> None:
        if len(words) != order.words and (order.words > 0 or len(words) < -order.words):
            raise ReplyError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        self.node.check(order)

    def _service(self, name: bytes, words: Command) -> Reply:
        if name in (b"EXEC", b"DISCARD"):
            return self._end_transaction(name)
        if self._queued is not None:
            raise NotBuilt(words)
        if name in (b"MULTI", b"WATCH", b"UNWATCH"):
            return self._transaction(name, words)
        return self.node.service(name, words)

    def _transaction(self, name: bytes, words: Command) -> Reply:
        if name == b"MULTI":
            self._queued, self._is_refused = [], False
        elif name == b"UNWATCH":
            self._unwatch()
        else:
            for key in words[1:]:
                # A key that has expired by now counts as absent.
                self.node.look(key)
                self.watched[key] = None
                self.node.watchers.setdefault(key, {})[self] = None
            self.node.finish(self.client)
        return OK

    def _end_transaction(self, name: bytes) -> Reply:
        if self._queued is None:
            raise ReplyError(f"ERR {name.decode()} without MULTI")
        queued, self._queued = self._queued, None
        if name == b"EXEC":
            return self._exec(queued)
        self._unwatch()
        return OK

    def _exec(self, queued: list[Command]) -> Reply:
        node = self.node
        if self._is_refused:
            self._unwatch()
            return ReplyError(ABORTED)
        orders = [COMMANDS[words[0].upper()] for words in queued]
        try:
            for order in orders:
                node.check(order)
        except ReplyError as error:
            self._unwatch()
            return ReplyError(f"EXECABORT Transaction discarded because of: {error}")
        for key in self.watched:
            node.look(key)
        is_dirty = self.is_dirty
        self._unwatch()
        replies = (
            NULL_ARRAY
            if is_dirty
            else [node.execute(order, words) for order, words in zip(orders, queued, strict=True)]
        )
        node.finish(self.client)
        return replies

    def _unwatch(self) -> None:
        for key in self.watched:
            watchers = self.node.watchers[key]
            watchers.pop(self, None)
            if not watchers:
                del self.node.watchers[key]
        self.watched.clear()
        self.is_dirty = False

    # -- an XREAD that blocks

    def _wait(self, words: Command, wait_ms: int) -> None:
        self._waiting = words
        self.node.waiting[self] = frozenset(key for key, _ in read_request(words).after)
        if wait_ms:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_ms / 1_000, self._give_up)

    def _give_up(self) -> None:
        if self.node.is_stopped:
            self._is_overdue = True
        else:
            self._finish_wait(NULL_ARRAY)

    def look_again(self) -> None:
        """Execute the waiting XREAD, after one of its streams got an entry."""
        assert self._waiting is not None
        reply = self.node.execute(COMMANDS[b"XREAD"], self._waiting)
        if reply is not NULL_ARRAY:
            self._finish_wait(reply)

    def refuse_wait(self, text: str) -> None:
        """End the waiting XREAD with an error."""
        self._finish_wait(ReplyError(text))

    def _finish_wait(self, reply: Reply) -> None:
        self._stop_waiting()
        self._answer(reply)
        self._process()

    def _stop_waiting(self) -> None:
        self._waiting = None
        self._is_overdue = False
        self.node.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def encode(reply: Reply, out: list[bytes]) -> None:
    """Append a reply in the form of RESP2."""
    # Most replies are of these kinds; a match statement takes three times as long.
    kind = type(reply)
    if kind is bytes:
        out.append(b"$%d\r\n%b\r\n" % (len(reply), reply))
    elif kind is list:
        encode_list(reply, out)
    elif kind is int:
        out.append(b":%d\r\n" % reply)
    elif isinstance(reply, Status):
        out.append(b"+%b\r\n" % reply)
    elif isinstance(reply, (bytes, int)):
        encode(bytes(reply) if isinstance(reply, bytes) else int(reply), out)
    elif reply is None:
        out.append(b"$-1\r\n")
    elif isinstance(reply, NullArray):
        out.append(b"*-1\r\n")
    elif isinstance(reply, ReplyError):
        out.append(b"-%b\r\n" % str(reply).encode())
    else:
        encode_list(reply, out)


def encode_list(replies: Sequence[Any], out: list[bytes]) -> None:
    """Append replies as one list."""
    out.append(b"*%d\r\n" % len(replies))
    for reply in replies:
        encode(reply, out)
