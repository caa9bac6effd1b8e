# SPDX-License-Identifier: Apache-2.0
"""The check whether a patched engine answers, and where it publishes."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import zmq

from kvrouter.events.patch.decode import read_answer
from kvrouter.events.patch.messages import MAX_PORT, Hello, HelloRequest
from kvrouter.events.transport.curve import CurveClient
from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.settings import LinkSettings

# Answers that wait unread.
_ANSWERS_HWM = 100

_WILDCARD_HOSTS = frozenset(("*", "0.0.0.0", "[::]", "::"))


class ClientRefused(Exception):
    """A refusal by a patch that lists the clients it admits, without this side's key."""


def reachable(reports: str, requests: str) -> str | None:
    """Return the endpoint to connect to for `reports`, as a `Hello` names it. A wildcard is the host of `requests`.

    Returns None if `reports` is no endpoint of the same transport, as an answer must not make this process open a file
    or another kind of socket.
    """
    scheme, _, rest = reports.partition("://")
    requests_scheme, _, requests_rest = requests.partition("://")
    if scheme != requests_scheme or not rest or "\0" in rest:
        return None
    if scheme != "tcp":
        return reports
    host, _, port = rest.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port[:9]) <= MAX_PORT:
        return None
    if host in _WILDCARD_HOSTS:
        host = requests_rest.rpartition(":")[0]
    return f"tcp://{host}:{port}"


async def _refuses(endpoint: str) -> bool:
    """Return whether connections to this endpoint are refused, as no process listens; False if that is not known."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp":
        return False
    # The same choice as ZMQ's.
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (host.strip("[]"), int(port)))
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError, OverflowError):
            return False
    return False


async def greet(
    requests_endpoint: str,
    *,
    context: zmq.Context[zmq.Socket[bytes]],
    timeout_s: float,
    curve: CurveClient | None = None,
    waits: bool = True,
    watch: FloodWatch | None = None,
) -> Hello | None:
    """Return the engine's answer at this endpoint, or None if none comes in time.

    Args:
        requests_endpoint: The address of the patch's requests socket.
        context: Makes the socket.
        timeout_s: The time to wait for an answer.
        curve: As in `Link`.
        waits: False to give up at once if no process listens there. A ZMQ socket needs ten times as much to find that
            out as a refused connection does.
        watch: As in `Link`.

    Raises:
        zmq.ZMQError: The endpoint is no address.
        ClientRefused: The engine does not admit this client's key.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if not waits and await _refuses(requests_endpoint):
                return None
    except TimeoutError:
        return None
    readable = asyncio.Event()
    link = Link(
        context,
        requests_endpoint,
        LinkSettings(),
        loop=asyncio.get_running_loop(),
        on_readable=readable.set,
        receive_hwm=_ANSWERS_HWM,
        curve=curve,
        # The news of a lasting link includes a refusal of the key.
        lasting=curve is not None,
        watch=watch,
    )
    request = HelloRequest(1)
    try:
        async with asyncio.timeout(timeout_s):
            link.send(b"", msgspec.msgpack.encode(request))
            while True:
                readable.clear()
                while frames := link.receive():
                    reply = read_answer(frames)
                    if isinstance(reply, Hello) and reply.id == request.id:
                        return reply
                    # Even during a flood, other tasks and the timeout get their turn.
                    await asyncio.sleep(0)
                if curve is not None:
                    link.take_news()
                    if link.is_refused:
                        raise ClientRefused
                if not link.readable():
                    await readable.wait()
    except TimeoutError:
        return None
    finally:
        link.close()
