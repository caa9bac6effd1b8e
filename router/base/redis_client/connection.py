# SPDX-License-Identifier: Apache-2.0
"""One connection to one Redis or Valkey server: send packed commands, receive as many replies.

redis-py connects and logs in; then a plain asyncio protocol over hiredis' reader takes over the transport. Reading
reply by reply, as redis-py does, would make a commit cost a third more CPU time
(`docs/adr/0005-redis-py-connects-commits-are-packed-here.md`). Retries and pooling are in `servers.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hiredis
from redis.asyncio import connection as redis_py
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as ConnectTimeout

from kvrouter.router.base.redis_client.errors import ReplyError, StoreUnavailable
from kvrouter.router.base.redis_client.url import NO_LOGIN, Address, Login, address_text

# A server that cannot be reached in this time counts as down; the follower and the owner keep trying.
CONNECT_TIMEOUT_S = 5.0
# The longest a healthy server may take for one request; a commit of 2,048 transitions takes under 1 ms.
RESPONSE_TIMEOUT_S = 10.0
# Options of every redis-py connection: RESP2, and no command that an ACL might not allow (CLIENT SETINFO).
PLAIN_LOGIN: dict[str, Any] = {"protocol": 2, "driver_info": None}
# The replies to a login have one common time limit, which `Connection.open` sets.
_OPTIONS = PLAIN_LOGIN | {"socket_timeout": None, "socket_connect_timeout": CONNECT_TIMEOUT_S}


class Connection(asyncio.Protocol):
    """A logged-in connection that runs one request at a time: call `run` again only after the last one has returned."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        # A reference is kept because the writer closes its transport when it is deleted.
        self._writer = writer
        self._reader = hiredis.Reader()
        self._replies: list[Any] = []
        self._wanted = 0
        self._waiting: asyncio.Future[None] | None = None
        # When the request under way fails, on the loop's clock. One timer serves many requests: when it fires, it looks
        # whether that time has come.
        self._deadline_s = 0.0
        self._timeout_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        writer.transport.set_protocol(self)

    @classmethod
    async def open(cls, address: Address, login: Login = NO_LOGIN) -> Connection:
        """Connect and log in. Raises StoreUnavailable, or ReplyError if the server refuses the login."""
        link = _link(address, login)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S + RESPONSE_TIMEOUT_S):
                await link.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await link.disconnect(nowait=True)
            if isinstance(error, (RedisError, TimeoutError)):
                raise _open_error(address_text(address), error, login) from None
            raise
        # From here on redis-py does not use the transport. Every reply to the login was read, so its reader is empty.
        writer, link._reader, link._writer = link._writer, None, None
        assert writer is not None
        return cls(writer)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._writer.is_closing()

    async def run(self, request: bytes, replies: int, timeout_s: float = RESPONSE_TIMEOUT_S) -> list[Any]:
        """Send `request` and return its `replies` replies.

        Raises ReplyError for the first error among the replies, and StoreUnavailable if the connection ends or
        `timeout_s` passes. After any exception, including a cancellation, the connection must be closed, because
        replies may be under way.
        """
        if self.closed:
            raise StoreUnavailable("the connection to the server is closed")
        self._replies, self._wanted = [], replies
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        self._set_deadline(timeout_s)
        self._writer.write(request)
        try:
            await waiting
        finally:
            self._waiting = None
        received, self._replies = self._replies, []
        for reply in received:
            if isinstance(reply, hiredis.ReplyError):
                raise ReplyError(str(reply))
        return received

    def close(self) -> None:
        """End the connection; a `run` under way raises StoreUnavailable."""
        self._stop_timer()
        self._writer.transport.abort()
        self._fail("the connection was closed")

    def data_received(self, data: bytes) -> None:
        """Collect the complete replies, and resume `run` when all of them are there."""
        try:
            self._reader.feed(data)
            # `False` is hiredis' mark for "not complete yet": no RESP2 reply is False.
            while (reply := self._reader.gets()) is not False:
                self._replies.append(reply)
        except hiredis.ProtocolError as error:
            self._fail(f"what answers there is no Redis server: {error}")
            self.close()
            return
        if len(self._replies) >= self._wanted and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make a `run` under way raise StoreUnavailable."""
        self._stop_timer()
        self._fail("the server closed the connection" if exc is None else f"the connection was lost: {exc}")

    def _set_deadline(self, timeout_s: float) -> None:
        """Have the request that begins fail after this time, with the timer there is unless that fires too late."""
        loop = asyncio.get_running_loop()
        self._timeout_s, self._deadline_s = timeout_s, loop.time() + timeout_s
        if self._timer is not None and self._timer.when() > self._deadline_s:
            self._stop_timer()
        if self._timer is None:
            self._timer = loop.call_at(self._deadline_s, self._look_at_deadline, loop)

    def _look_at_deadline(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiting is None:
            return
        if loop.time() < self._deadline_s:
            self._timer = loop.call_at(self._deadline_s, self._look_at_deadline, loop)
        else:
            self._fail(f"the server did not answer in {self._timeout_s:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, reason: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(StoreUnavailable(reason))


def _open_error(where: str, error: RedisError | TimeoutError, login: Login) -> ReplyError | StoreUnavailable:
    # Over a unix socket redis-py logs in while it connects, and wraps what the server replies.
    for reply in (error, error.__cause__):
        # redis-py counts some replies (LOADING, NOAUTH) among the errors of a connection, and takes codes off.
        if isinstance(reply, RedisError) and reply.status_code is not None:
            return ReplyError(f"{reply.status_code} {reply}")
        if isinstance(reply, ResponseError):
            return ReplyError(str(reply))
    if isinstance(error, ConnectTimeout):
        return StoreUnavailable(f"{where} did not accept a connection in {CONNECT_TIMEOUT_S:g} s")
    # A server that speaks TLS may reset the connection of one that does not.
    if isinstance(error.__context__, OSError) and not isinstance(error.__context__, ConnectionResetError):
        return StoreUnavailable(f"{where} cannot be reached: {str(error).rstrip('.')}")
    hint = "" if login.tls else "; a server that speaks TLS wants rediss:// in the URL"
    return StoreUnavailable(f"{where} did not answer the login: {str(error) or 'not in time'}{hint}")


def _link(address: Address, login: Login) -> redis_py.AbstractConnection:
    options = _OPTIONS | login.options
    if isinstance(address, str):
        return redis_py.UnixDomainSocketConnection(path=address, **options)
    host, port = address
    if login.tls is None:
        return redis_py.Connection(host=host, port=port, **options)
    link = redis_py.SSLConnection(host=host, port=port, **options)
    link.ssl_context = login.tls
    return link
