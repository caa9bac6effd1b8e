# SPDX-License-Identifier: Apache-2.0
"""Probes what listens at the endpoints of workers: a short look at each from this process.

A ZMQ socket names its type in the first bytes that it sends (ZMTP 3.0, rfc.zeromq.org/spec/23), so a probe detects a
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

# A local network answers in some milliseconds; a port that drops packets never does.
TIMEOUT_S = 1.0
# How many descriptors one diagnosis uses; with this many, a thousand endpoints that do not answer take some 16 s.
LOOKS_AT_ONCE = 64
# The limit of all probes together. The answers of endpoints that were not probed by then are unknown.
DEADLINE_S = 20.0

SIGNATURE = b"\xff" + 8 * b"\0" + b"\x7f"
# The greeting of a client with version 3.0 and no encryption.
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + 31 * b"\0"
MECHANISM = slice(12, 32)
COMMAND_FLAG = 0x04
SOCKET_TYPE = b"Socket-Type"
# The types of sockets that publish, and of those that answer requests.
PUBLISHERS = frozenset({"PUB", "XPUB"})
REPLIERS = frozenset({"ROUTER", "REP"})


T = TypeVar("T")


class EndpointAnswer(msgspec.Struct, frozen=True):
    """The answer of an endpoint to a probe."""

    # Why there is no connection; empty if there is one.
    problem: str = ""
    # Whether a ZMQ socket answered.
    is_zmq: bool = False
    # The type of the ZMQ socket; empty if it did not name it, because it is encrypted or slow.
    socket: str = ""


async def probe_endpoints(endpoints: Iterable[str]) -> dict[str, EndpointAnswer]:
    """Return the answer of each ZMQ endpoint that was probed before the deadline."""
    return await _each(endpoints, probe_endpoint)


async def probe_endpoint(endpoint: str) -> EndpointAnswer:
    """Return the answer of one ZMQ endpoint, as far as it is complete within TIMEOUT_S."""
    answer = EndpointAnswer(f"no connection within {TIMEOUT_S:g} s")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await _connect(endpoint)
            async for fuller in _greet(reader, writer):
                answer = fuller
    except (TimeoutError, asyncio.IncompleteReadError):
        # The answer stays that of the bytes received so far.
        pass
    except (OSError, ValueError) as error:
        if writer is None:
            return EndpointAnswer(_error_text(error))
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
    """Exchange greetings with a ZMQ socket and yield ever fuller answers.

    Raises IncompleteReadError and OSError if the other side ends the connection.
    """
    yield EndpointAnswer()
    # In two steps, because a socket that is encrypted cuts the connection at the second one, which may also lose what
    # it had sent before.
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
    """Return the socket's type from a READY command.

    The type is a property: its name, the length of its value in four bytes, and the value.
    """
    _, _, rest = ready.partition(SOCKET_TYPE)
    return rest[4 : 4 + int.from_bytes(rest[:4], "big")].decode("ascii", "replace")


async def probe_engines(
    http: aiohttp.ClientSession, urls: Iterable[str], wall_clock: Callable[[], float]
) -> tuple[dict[str, str], dict[str, float]]:
    """Probe the HTTP port of each engine, and compare its clock with this machine's.

    Returns:
        Two mappings by URL. The first has the reason why a port is closed from here, or "" if it is open. The second
        has the seconds by which an engine's clock is ahead of this machine's, if the engine's answer has a date.
    """
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
            return _error_text(error.os_error)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            # The port is not closed; the poller judges whether the engine lives.
            return ""
        return ""

    return await _each(urls, look), ahead


async def _each(names: Iterable[str], look: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Return the result of each probe that ended before the deadline."""
    results: dict[str, T] = {}
    slots = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def look_at(name: str) -> None:
        async with slots:
            results[name] = await look(name)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*map(look_at, set(names)))
    return results


def _error_text(error: OSError | ValueError) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__
