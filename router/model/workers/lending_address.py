# SPDX-License-Identifier: Apache-2.0
"""The address at which other engines reach an engine that lends chunks, from what it declares and how it is registered."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from kvrouter.events.patch.messages import MAX_PORT, PeerAddress
from kvrouter.router.model.workers.engine_answers import is_loopback, is_wildcard

# No name of a host is longer (RFC 1035). The digest has 32 digits now.
MAX_HOST_CHARS = 253
MAX_EXCHANGE_CHARS = 128


def lending_address(declared: PeerAddress, endpoints: Iterable[str | None]) -> PeerAddress | None:
    """Return the address to give to other engines, or None for a declaration that no engine makes.

    An engine that lends at a loopback address lends only to engines of its machine, so the machine becomes a part of
    `exchange`: as the engine names it, because several machines may be reached over tunnels that begin at one loopback
    address, or else as the router reaches it.

    Args:
        declared: The address as the engine declares it.
        endpoints: The endpoints and URLs at which this router reaches the engine; those that name no host are ignored.
    """
    is_plausible = (
        0 < len(declared.host) <= MAX_HOST_CHARS
        and declared.host.isprintable()
        and " " not in declared.host
        and 0 < declared.port <= MAX_PORT
        and 0 < len(declared.exchange) <= MAX_EXCHANGE_CHARS
        and len(declared.machine) <= MAX_EXCHANGE_CHARS
        and declared.resets >= 0
        and declared.token_bytes >= 0
    )
    if not is_plausible:
        return None
    known = [name for endpoint in endpoints if endpoint and (name := _host_of(endpoint))]
    # A loopback address means nothing to an engine on another machine.
    reached = next((name for name in known if not is_loopback(name)), known[0] if known else None)
    host = reached if is_wildcard(declared.host) else declared.host
    if host is None:
        return None
    exchange = declared.exchange
    if is_loopback(host):
        reached_machine = "" if reached is None or is_loopback(reached) else reached
        exchange = f"{exchange}@{declared.machine or reached_machine}"
    return msgspec.structs.replace(declared, host=host, exchange=exchange)


def _host_of(endpoint: str) -> str | None:
    try:
        host = urlsplit(endpoint).hostname
    except ValueError:
        return None
    return None if host is None or is_wildcard(host) else host
