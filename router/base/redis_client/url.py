# SPDX-License-Identifier: Apache-2.0
"""The parts of a Redis URL. redis-py parses it; the modes `+cluster` and `+sentinel` are ours.

Pure but for TLS files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from kvrouter.router.base.redis_client.errors import StoreError

# redis-py is imported where it is used, because the import takes longer than refusing a wrong URL.
if TYPE_CHECKING:
    from redis.asyncio.connection import RedisSSLContext

# Host and port, or the path of a unix socket.
Address = tuple[str, int] | str

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
_SCHEMES = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix"}
_MODES = {"": ("redis", "rediss", "unix"), "cluster": ("redis", "rediss"), "sentinel": ("redis", "rediss")}
_URL_FORM = (
    "redis://[user:password@]host:port[/db], rediss://... (TLS), unix:///path, redis+cluster://host:port, "
    "redis+sentinel://[user:password@]host:port,host:port/service[/db]"
)
_OPTIONS = frozenset({"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


class Login(msgspec.Struct, frozen=True):
    """The login for every server that the URL leads to. `options` are arguments of redis-py's connections."""

    options: dict[str, Any] = {}
    tls: RedisSSLContext | None = None

    def __repr__(self) -> str:
        # The password must not reach a log.
        return f"Login({sorted(self.options)})"


NO_LOGIN = Login()


class StoreUrl(msgspec.Struct, frozen=True):
    """The parsed form of a Redis URL."""

    # The server, or one node of the cluster. With Sentinel it means nothing.
    address: Address
    login: Login
    must_be_cluster: bool = False
    # The Sentinels that name the primary of `service`.
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    # Arguments of redis-py's connections to the Sentinels.
    sentinel_options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"StoreUrl({address_text(self.address)})"


def address_text(address: Address) -> str:
    """Return the address as text: the socket's path, or host:port."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def parse_url(url: str) -> StoreUrl:
    """Return the parts of a Redis URL. Raises StoreError, which names the right form and nothing of the wrong one.

    The exception has no cause either: urllib's errors quote pieces of the URL, and an unquoted '/' in a password makes
    the password such a piece.
    """
    try:
        return _parsed(url)
    except ValueError:
        raise StoreError(
            f"the Redis URL cannot be read: write {_URL_FORM}, with special characters of a password percent-encoded"
        ) from None


def _parsed(url: str) -> StoreUrl:
    parts = urlsplit(url)
    written, _, mode = parts.scheme.partition("+")
    scheme = _SCHEMES.get(written)
    if scheme is None or scheme not in _MODES.get(mode, ()):
        raise StoreError(f"the Redis URL has an unknown scheme: write {_URL_FORM}")
    query = dict(parse_qsl(parts.query))
    allowed = _OPTIONS | (_SENTINEL_OPTIONS if mode == "sentinel" else frozenset())
    if unknown := sorted(set(query) - allowed):
        raise StoreError(f"the Redis URL has unknown options {unknown}: known are {sorted(allowed)}")
    user, at, hosts = parts.netloc.rpartition("@")
    path, service = parts.path, ""
    if mode == "sentinel":
        service, _, path = path.lstrip("/").partition("/")
        if not service:
            raise StoreError(f"the Redis URL names no service that Sentinel watches: write {_URL_FORM}")
    if scheme == "unix" and not path:
        raise StoreError("the Redis URL names no socket: write unix:///path/to/socket")
    if scheme != "unix" and path.strip("/"):
        int(path.strip("/"))
    sentinel_login = {name.removeprefix("sentinel_"): query.pop(name) for name in allowed - _OPTIONS if name in query}
    host = "" if mode == "sentinel" else hosts
    # Reading a port raises for one that is no number.
    parts._replace(netloc=host).port  # noqa: B018
    from redis.asyncio.connection import parse_url as parse_server_url

    options: dict[str, Any] = {
        **parse_server_url(
            parts._replace(scheme=scheme, netloc=user + at + host, path=path, query=urlencode(query)).geturl()
        )
    }
    options.pop("connection_class", None)
    address: Address = options.pop("path", "") or (options.pop("host", "localhost"), options.pop("port", DEFAULT_PORT))
    login = Login(options, _tls(options) if scheme == "rediss" else None)
    if mode != "sentinel":
        return StoreUrl(address, login, must_be_cluster=mode == "cluster")
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    if login.tls is not None:
        tls["ssl"] = True
    sentinels = tuple(_sentinel(text) for text in hosts.split(","))
    return StoreUrl(sentinels[0], login, False, sentinels, unquote(service), sentinel_login | tls)


def _sentinel(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return unquote(parts.hostname or "localhost"), parts.port or DEFAULT_SENTINEL_PORT


def _tls(options: dict[str, Any]) -> RedisSSLContext:
    """Return the TLS context of the options, made once so that no connection reads the files again."""
    from redis.asyncio.connection import SSLConnection
    from redis.exceptions import RedisError

    try:
        context = SSLConnection(**options).ssl_context
        context.get()
    except (OSError, RedisError) as error:
        raise StoreError(f"the Redis URL has TLS options that cannot be used ({error}); correct them") from error
    return context
