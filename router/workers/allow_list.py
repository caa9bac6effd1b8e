# SPDX-License-Identifier: Apache-2.0
"""Where the router may connect to on the word of a registration or of an engine. Pure: nothing is resolved.

A name is matched as a name and an address as an address: a name that is listed is trusted wherever its owner's DNS
points, and a network in the list admits no name, because what the name resolves to now it need not resolve to when we
connect.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from kvrouter.router.common.errors import SettingError
from kvrouter.router.workers.registration import NO_PATCH, Registration

SETTING = "allow_hosts"
FORM = "a host name, *.domain, an IP address, a network like 10.0.0.0/8, or ipc:///path (with a last slash: a folder)"

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
# What looks like a number is one to the C library (127.1, 0x7f000001): a typing error in the list, not a name.
_NUMBER = re.compile(r"(0[xX][0-9A-Fa-f]+|[0-9.]+)\.?")
# Every form of `ipc://` is longer; the rest is the path, or @name in Linux' abstract namespace.
_IPC = "ipc://"

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowList:
    """What `allow_hosts` lists; empty: everything is allowed."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises SettingError for an entry that is none."""
        self._names: set[str] = set()
        self._domains: list[str] = []
        self._networks: list[_Network] = []
        self._paths: set[str] = set()
        self._folders: list[str] = []
        self._open = True
        for entry in entries:
            self._open = False
            self._add(entry)

    def _add(self, entry: str) -> None:
        if entry.startswith(_IPC) and len(entry) > len(_IPC):
            path = entry.removeprefix(_IPC)
            if path.endswith("/"):
                self._folders.append(_plain_path(path).rstrip("/") + "/")
            else:
                self._paths.add(_plain_path(path))
            return
        try:
            self._networks.append(ipaddress.ip_network(entry.removeprefix("[").removesuffix("]")))
            return
        except ValueError:
            if "/" in entry or not _NAME.fullmatch(entry) or _NUMBER.fullmatch(entry):
                raise SettingError(f"{SETTING} has {entry!r}: write {FORM}, without host bits or port") from None
        name = _plain_name(entry)
        if name.startswith("*."):
            self._domains.append(name[1:])
        else:
            self._names.add(name)

    def problem(self, endpoint: str) -> str | None:
        """Why the router must not connect to `endpoint`, a URL or a ZMQ endpoint; None when it may."""
        if self._open:
            return None
        if endpoint.startswith(_IPC):
            path = _plain_path(endpoint.removeprefix(_IPC))
            known = path in self._paths or any(path.startswith(folder) for folder in self._folders)
            return None if known else _refusal(f"{_IPC}{path}", "the path or its folder")
        try:
            host = urlsplit(endpoint).hostname
        except ValueError:
            host = None
        if not host:
            return _refusal(endpoint, "its host")
        address = _address_of(host)
        if address is not None:
            known = any(address in network for network in self._networks if network.version == address.version)
        else:
            name = _plain_name(host)
            known = name in self._names or any(name.endswith(domain) for domain in self._domains)
        return None if known else _refusal(host, "it" if address is None else "it or its network")

    def registration_problem(self, registration: Registration) -> str | None:
        """Why a worker must not be followed: the first of its addresses that is not allowed."""
        addresses = {
            "endpoint": registration.events,
            "replay_endpoint": registration.replay,
            "patch_endpoint": None if registration.patch == NO_PATCH else registration.patch,
            "url": registration.url,
        }
        for field, endpoint in addresses.items():
            problem = endpoint and self.problem(endpoint)
            if problem:
                return f"{field}: {problem}"
        return None


def _refusal(what: str, add: str) -> str:
    return f"{what} is not in the router's setting {SETTING}; add {add} there, or register an address that is listed"


def _plain_name(host: str) -> str:
    return host.lower().removesuffix(".")


def _plain_path(path: str) -> str:
    """The path without `..` and doubled slashes. A link in a listed folder is followed: who may write there is
    trusted."""
    plain = posixpath.normpath(path)
    # POSIX leaves two leading slashes to the system; Linux reads one.
    return plain[1:] if plain.startswith("//") else plain


def _address_of(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
