# SPDX-License-Identifier: Apache-2.0
"""What listens at the endpoints of workers: a short look at each from this process.

A ZMQ socket names its type in the first bytes that it sends (ZMTP 3.0, rfc.zeromq.org/spec/23), so that a look shows a
closed port, another program, and two endpoints that were swapped. Nothing is subscribed or requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from kvrouter.router.model.workers.engine_answers import MODELS_PATH

# A local network answers in some milliseconds; a port that drops what comes never does.
TIMEOUT_S = 1.0
# Descriptors of one diagnosis; a thousand dark endpoints take some 16 s.
LOOKS_AT_ONCE = 64
# Of all looks together. What is not looked at by then is not known.
DEADLINE_S = 20.0

SIGNATURE = b"\xff" + 8 * b"\0" + b"\x7f"
# Version 3.0, no encryption, a client.
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + 31 * b"\0"
MECHANISM = slice(12, 32)
COMMAND_FLAG = 0x04
SOCKET_TYPE = b"Socket-Type"
# What publishes, and what answers requests.
PUBLISHERS = frozenset({"PUB", "XPUB"})
REPLIERS = frozenset({"ROUTER", "REP"})


T = TypeVar("T")


class EndpointAnswer(msgspec.Struct, frozen=True):
    """problem: why there is no connection; empty: there is one. is_zmq: a ZMQ socket answered. socket: its type, empty
    where it did not say (it is encrypted, or slow)."""

    problem: str = ""
    is_zmq: bool = False
    socket: str = ""


async def probe_endpoints(endpoints: Iterable[str]) -> dict[str, EndpointAnswer]:
    """What listens at each ZMQ endpoint, as far as is known in time."""
    return await _each(endpoints, probe_endpoint)


async def probe_endpoint(endpoint: str) -> EndpointAnswer:
    """What listens there, as far as it says in time."""
    answer = EndpointAnswer(f"no connection within {TIMEOUT_S:g} s")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await _connect(endpoint)
            async for said in _greet(reader, writer):
                answer = said
    except (TimeoutError, asyncio.IncompleteReadError):
        # What was heard so far is known.
        pass
    except (OSError, ValueError) as error:
        if writer is None:
            return EndpointAnswer(_said(error))
    finally:
        if writer is not None:
            writer.transport.abort()
    return answer


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return await asyncio.open_unix_connection(rest)
    host, _, port = rest.rpartition(":")
    return await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), int(port))


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[EndpointAnswer]:
    """Each answer says more than the one before. Raises IncompleteReadError and OSError where the other side ends."""
    yield EndpointAnswer()
    # In two steps: one that is encrypted cuts the connection at the second, and what it had sent may be lost with it.
    writer.write(SIGNATURE)
    signature = await reader.readexactly(len(SIGNATURE))
    if (signature[0], signature[-1]) != (SIGNATURE[0], SIGNATURE[-1]):
        return
    yield EndpointAnswer(is_zmq=True)
    writer.write(GREETING.removeprefix(SIGNATURE))
    greeting = signature + await reader.readexactly(len(GREETING) - len(SIGNATURE))
    if greeting[MECHANISM].rstrip(b"\0") != b"NULL":
        return
    flags, size = await reader.readexactly(2)
    if flags & COMMAND_FLAG:
        yield EndpointAnswer(is_zmq=True, socket=_socket_type(await reader.readexactly(size)))


def _socket_type(ready: bytes) -> str:
    """A property is its name, the length of its value in four bytes, and the value."""
    _, _, rest = ready.partition(SOCKET_TYPE)
    return rest[4 : 4 + int.from_bytes(rest[:4], "big")].decode("ascii", "replace")


async def probe_engines(
    http: aiohttp.ClientSession, urls: Iterable[str], wall_clock: Callable[[], float]
) -> tuple[dict[str, str], dict[str, float]]:
    """By URL: why an engine's HTTP port is closed from here, empty where it is not; and by how many seconds its clock
    is ahead of ours, where it says the time."""
    ahead: dict[str, float] = {}

    async def look(url: str) -> str:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                http.get(url.rstrip("/") + MODELS_PATH, allow_redirects=False) as answer,
            ):
                if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and (date := answer.headers.get("date")):
                    ahead[url] = parsedate_to_datetime(date).timestamp() - wall_clock()
        except aiohttp.ClientConnectorError as error:
            return _said(error.os_error)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            # Whether it lives is judged by those who poll it.
            return ""
        return ""

    return await _each(urls, look), ahead


async def _each(names: Iterable[str], look: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """What each look found, of those that ended before the deadline."""
    found: dict[str, T] = {}
    slots = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def one(name: str) -> None:
        async with slots:
            found[name] = await look(name)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*map(one, set(names)))
    return found


def _said(error: OSError | ValueError) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__
