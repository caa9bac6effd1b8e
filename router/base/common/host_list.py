# SPDX-License-Identifier: Apache-2.0
"""Lists of hosts in settings: names, domains, addresses and networks. Pure: nothing is resolved.

A name is matched as a name and an address as an address. A network in the list does not admit a name, because the
addresses behind a name may change at any time.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Iterable

from kvrouter.router.base.common.errors import SettingError

# The forms of an entry, for errors and help.
HOST_FORM = "a host name, *.domain, an IP address, a network like 10.0.0.0/8"

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
# The C library reads these as IPv4 addresses (127.1, 0x7f000001). In a list they are typing errors, not names.
_NUMBER = re.compile(r"(0[xX][0-9A-Fa-f]+|[0-9.]+)\.?")
# One to four numbers, each decimal, octal or hexadecimal (inet_aton).
_NUMBER_PARTS = re.compile(r"(0[xX][0-9A-Fa-f]+|[0-9]+)(\.(0[xX][0-9A-Fa-f]+|[0-9]+)){0,3}\.?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# How many hosts are kept with their addresses, and the longest of them: as long as an IPv6 address can be.
KEPT_HOSTS = 4_096
KEPT_CHARS = 45


class HostList:
    """A list of host names, domains and networks, which `add` extends."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._domains: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []

    def add(self, entry: str) -> None:
        """Add an entry. Raises ValueError if it has none of the forms of HOST_FORM."""
        try:
            self._networks.append(ipaddress.ip_network(entry.removeprefix("[").removesuffix("]")))
            return
        except ValueError:
            if "/" in entry or not _NAME.fullmatch(entry) or _NUMBER.fullmatch(entry):
                raise
        name = plain_name(entry)
        if name.startswith("*."):
            self._domains.append(name[1:])
        else:
            self._names.add(name)

    def holds(self, host: str) -> bool:
        """Return whether the host, a name or an address without brackets, is in the list."""
        address = address_of(host)
        if address is not None:
            return any(address in network for network in self._networks if network.version == address.version)
        name = plain_name(host)
        return name in self._names or any(name.endswith(domain) for domain in self._domains)


def allowed_hosts(entries: Iterable[str]) -> HostList:
    """Return the hosts of the setting `allowed_hosts`. Raises SettingError for an invalid entry."""
    hosts = HostList()
    for entry in entries:
        try:
            hosts.add(entry)
        except ValueError:
            raise SettingError(f"allowed_hosts has {entry!r}: write {HOST_FORM}, without host bits or port") from None
    return hosts


def plain_name(host: str) -> str:
    """Return the name in lower case, without a final dot."""
    return host.lower().removesuffix(".")


def number_address(host: str) -> Address | None:
    """Return the address that the C library reads the host as, which knows more forms than `address_of`."""
    address = address_of(host.partition("%")[0])
    if address is None and _NUMBER_PARTS.fullmatch(host):
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host.removesuffix(".")))
        except OSError:
            return None
    return address


def address_of(host: str) -> Address | None:
    """Return the host as an address, an IPv4-mapped one as IPv4; None if the host is a name."""
    # Engines' hosts are looked at several times a second. Clients name hosts too, and those may be long.
    return _kept_address(host) if len(host) <= KEPT_CHARS else _address(host)


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


_kept_address = functools.lru_cache(KEPT_HOSTS)(_address)
