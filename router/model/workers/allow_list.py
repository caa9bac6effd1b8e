# SPDX-License-Identifier: Apache-2.0
"""The list of addresses that the router may connect to if a registration or an engine names them. Pure, without DNS.

A listed name is trusted wherever its owner's DNS points; `router/base/common/host_list.py` has the rules for matching
entries.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from urllib.parse import urlsplit

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.host_list import HOST_FORM, HostList, address_of, number_address
from kvrouter.router.model.workers.registration import NO_PATCH, Registration

SETTING = "allow_hosts"
FORM = f"{HOST_FORM}, or ipc:///path (with a last slash: a folder)"

# The error for a name with such an address.
LINK_LOCAL = f"{{host}} has a link-local address, which the router's setting {SETTING} does not list"

# The prefix of a local socket. It is followed by a path, or by @name in Linux' abstract namespace.
_IPC = "ipc://"


class AllowList:
    """The hosts and sockets that `allow_hosts` lists; an empty list allows everything."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Read the entries of `allow_hosts`. Raises SettingError for an entry that is not valid."""
        self._hosts = HostList()
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
            self._hosts.add(entry)
        except ValueError:
            raise SettingError(f"{SETTING} has {entry!r}: write {FORM}, without host bits or port") from None

    def problem(self, endpoint: str) -> str | None:
        """Return why the router must not connect to `endpoint`, a URL or a ZMQ endpoint, or None if it may."""
        if endpoint.startswith(_IPC):
            if self._open:
                return None
            path = _plain_path(endpoint.removeprefix(_IPC))
            is_listed = path in self._paths or any(path.startswith(folder) for folder in self._folders)
            return None if is_listed else _refusal(f"{_IPC}{path}", "the path or its folder")
        try:
            host = urlsplit(endpoint).hostname
        except ValueError:
            host = None
        if "?" in endpoint or "#" in endpoint:
            return (
                f"{endpoint} has a query or a fragment, which would stand before the path of each request: take it off"
            )
        if self._open:
            return None if not host or self.admits_address(host, host) else _refusal(host, "it or its network")
        if not host:
            return _refusal(endpoint, "its host")
        if self._hosts.holds(host):
            return None
        return _refusal(host, "it" if address_of(host) is None else "it or its network")

    def lists(self, host: str) -> bool:
        """Return whether the host is in the list, not only allowed because the list is empty."""
        return self._hosts.holds(host)

    def admits_address(self, host: str, address: str) -> bool:
        """Return whether to connect to an address of a host.

        Link-local addresses, where clouds give a machine its credentials, are admitted only if the host or the address
        is listed.
        """
        numeric = number_address(address)
        return numeric is None or not numeric.is_link_local or self._hosts.holds(host) or self._hosts.holds(address)

    def registration_problem(self, registration: Registration) -> str | None:
        """Return why a worker must not be followed, which names its first address that is not allowed, or None."""
        addresses = {
            "endpoint": registration.events,
            "replay_endpoint": registration.replay,
            "patch_endpoint": None if registration.patch == NO_PATCH else registration.patch,
            "url": registration.url,
            # The router does not connect there, but it has engines do so.
            "peer": registration.peer and f"tcp://{registration.peer}",
        }
        for field, endpoint in addresses.items():
            problem = endpoint and self.problem(endpoint)
            if problem:
                return f"{field}: {problem}"
        return None


def _refusal(what: str, add: str) -> str:
    return f"{what} is not in the router's setting {SETTING}; add {add} there, or register an address that is listed"


def _plain_path(path: str) -> str:
    """Return the path without `..` and doubled slashes.

    Symbolic links in a listed folder are followed, because everyone who may write there is trusted.
    """
    plain = posixpath.normpath(path)
    # POSIX leaves the meaning of two leading slashes to the system; Linux reads them as one.
    return plain[1:] if plain.startswith("//") else plain
