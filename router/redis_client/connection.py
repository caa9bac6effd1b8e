# SPDX-License-Identifier: Apache-2.0
"""One connection to one Redis or Valkey server: send packed commands, get as many replies.

A plain asyncio protocol over hiredis' reader. redis-py's connection does the same in three times the CPU time (144
against 46 us for a commit of 256 transitions, measured), and a router makes thousands of commits a second on its
event loop. No retries, no pooling here: see `cluster.py`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis
import msgspec

from kvrouter.router.redis_client.resp import command

# A server that cannot be reached in this time is down for us; the follower and the owner go on trying.
CONNECT_TIMEOUT_S = 5.0
# The longest a healthy server may take for one request; a commit of 2,048 transitions takes under 1 ms.
RESPONSE_TIMEOUT_S = 10.0
# Idle seconds before TCP probes a silent peer, so that a blocked reader notices a host that vanished.
KEEPALIVE_IDLE_S = 15

# Of a value that cannot be read: enough to recognise it in a sentence.
SHOWN_CHARS = 60

DEFAULT_PORT = 6379
_TLS_OF_SCHEME = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}
_URL_FORM = "redis://[user:password@]host:port[/db], rediss://... (TLS), unix:///path, redis+cluster://host:port"
_OPTIONS = frozenset({"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})


class StoreError(Exception):
    """The store refused, or holds what we did not write; says what to do. Never contains a password."""


class StoreUnavailable(StoreError):
    """The server cannot be reached or cannot answer now. Whether the last command took effect is unknown."""


class StoredValueError(StoreError):
    """A value in the store that no router writes. It says nothing of any other key: only what depends on it is not
    known."""

    def __init__(self, key: str, field: str, value: object) -> None:
        """field: empty where the key itself is meant."""
        what = f"{field} of {key}" if field else key
        super().__init__(
            f"Redis holds what no router writes: {what} is {_shown(value)}; correct or delete it, and let no "
            "other program write there"
        )
        self.key = key
        self.field = field


class ReplyError(StoreError):
    """An error reply. `code` is its first word, which is the protocol's error code (MOVED, NOAUTH, OOM, ...)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server listens and how to log in. `address` is (host, port) or the path of a unix socket."""

    address: tuple[str, int] | str
    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None
    must_be_cluster: bool = False

    def at(self, host: str, port: int) -> Endpoint:
        """Another node of the same cluster."""
        return msgspec.structs.replace(self, address=(host, port))

    def __str__(self) -> str:
        return self.address if isinstance(self.address, str) else f"{self.address[0]}:{self.address[1]}"

    # The password must not reach a log through a repr.
    __repr__ = __str__


def parse_url(url: str) -> Endpoint:
    """The endpoint that `url` names. Raises StoreError that tells the right form and shows nothing of a wrong one.

    Not even the cause is kept: urllib quotes pieces of the URL, and an unquoted '/' in a password makes it one.
    """
    try:
        parts = urlsplit(url)
        scheme, _, mode = parts.scheme.partition("+")
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        host, port = parts.hostname, parts.port
        db = int(options.get("db") or (parts.path.strip("/") if scheme != "unix" else "") or 0)
    except ValueError:
        raise StoreError(
            f"the Redis URL cannot be read: write {_URL_FORM}, with special characters of a password percent-encoded"
        ) from None
    if mode not in ("", "cluster") or (scheme not in _TLS_OF_SCHEME and (scheme != "unix" or mode)):
        raise StoreError(f"the Redis URL has an unknown scheme: write {_URL_FORM}")
    if unknown := sorted(set(options) - _OPTIONS):
        raise StoreError(f"the Redis URL has unknown options {unknown}: known are {sorted(_OPTIONS)}")
    address: tuple[str, int] | str
    if scheme == "unix":
        address = unquote(parts.path)
        if not address:
            raise StoreError("the Redis URL names no socket: write unix:///path/to/socket")
    else:
        address = (unquote(host or "localhost"), port or DEFAULT_PORT)
    return Endpoint(
        address=address,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        db=db,
        tls=_tls(options) if _TLS_OF_SCHEME.get(scheme) else None,
        must_be_cluster=mode == "cluster",
    )


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        unverified = options.get("ssl_cert_reqs") == "none"
        if unverified or options.get("ssl_check_hostname", "").lower() in ("0", "false", "no"):
            context.check_hostname = False
        if unverified:
            context.verify_mode = ssl.CERT_NONE
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except OSError as error:
        raise StoreError(f"the Redis URL names a TLS file that cannot be used ({error}); correct its path") from error
    return context


class Connection(asyncio.Protocol):
    """One request at a time: `run` again only after the last `run` has returned."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._replies: list[Any] = []
        self._wanted = 0
        self._waiting: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, endpoint: Endpoint) -> Connection:
        """A connection that has logged in. Raises StoreUnavailable, or ReplyError when the login is refused."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if isinstance(endpoint.address, str):
                    _, connection = await loop.create_unix_connection(cls, endpoint.address)
                else:
                    host, port = endpoint.address
                    _, connection = await loop.create_connection(cls, host, port, ssl=endpoint.tls)
        except TimeoutError:
            raise StoreUnavailable(f"{endpoint} did not accept a connection in {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise StoreUnavailable(f"{endpoint} cannot be reached: {error.strerror or error}") from error
        try:
            await connection._log_in(endpoint)
        except StoreUnavailable as error:
            connection.close()
            hint = "" if endpoint.tls else "; a server that speaks TLS wants rediss:// in the URL"
            raise StoreUnavailable(f"{endpoint} did not answer the login: {error}{hint}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    async def _log_in(self, endpoint: Endpoint) -> None:
        if endpoint.password is not None:
            user = () if endpoint.username is None else (endpoint.username,)
            await self.run(command("AUTH", *user, endpoint.password), 1)
        if endpoint.db:
            await self.run(command("SELECT", endpoint.db), 1)

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def run(self, request: bytes, replies: int, timeout_s: float = RESPONSE_TIMEOUT_S) -> list[Any]:
        """Sends `request` and returns its `replies` replies.

        Raises the first error among them as ReplyError, StoreUnavailable when the connection ends or `timeout_s`
        passes. After any exception, a cancellation too, the connection must be closed: replies may be under way."""
        if self.closed or self._transport is None:
            raise StoreUnavailable("the connection to the server is closed")
        self._replies, self._wanted = [], replies
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                await waiting
        except TimeoutError:
            raise StoreUnavailable(f"the server did not answer in {timeout_s:g} s") from None
        finally:
            self._waiting = None
        got, self._replies = self._replies, []
        for reply in got:
            if isinstance(reply, hiredis.ReplyError):
                raise ReplyError(str(reply))
        return got

    def close(self) -> None:
        """Ends the connection; a `run` under way raises StoreUnavailable."""
        if self._transport is not None:
            self._transport.abort()
        self._fail("the connection was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)

    def data_received(self, data: bytes) -> None:
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
        self._transport = None
        self._fail("the server closed the connection" if exc is None else f"the connection was lost: {exc}")

    def _fail(self, reason: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(StoreUnavailable(reason))
