# SPDX-License-Identifier: Apache-2.0
"""Rules against requests that any page in somebody's browser could have made the browser send. Pure.

Two attacks need no key and no access to the network except through the browser:

- DNS rebinding: the name of the attacker's page is pointed at this router's address, so the browser takes the router
  for the page's site and lets the page's scripts read the answers. The request's Host then names that site.
- Cross-site request forgery: a page sends a request that changes something here, without reading the answer. The
  browser marks such a request in Origin and Sec-Fetch-Site, which no script can set.

A client that is not a browser sends the name that it connected to as Host, and neither of the other two headers.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from kvrouter.router.base.common.host_list import address_of, allowed_hosts, plain_name
from kvrouter.router.model.config.settings import Config

# `uri-host [":" port]`; empty where the target has no authority.
HOST = re.compile(rb"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?\Z")

# Requests with these methods change nothing, and a page of another origin cannot read their answers
# (`router/serve/api/http/cors.py`).
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# The values of Sec-Fetch-Site with which browsers mark requests of their user (`none`) and of this router's own pages.
OWN_SITES = frozenset({b"same-origin", b"none"})
ANY_ORIGIN = "*"

# How many admitted Host headers are remembered, to skip the general parser for them: one for each name and address of
# the router that clients use. A page that tries many names gets none of them admitted, so it cannot fill the set.
MAX_KNOWN_HOSTS = 256
# The number of characters of a name that an error shows.
SHOWN_CHARS = 80


class BrowserPolicy:
    """The hosts that requests may name and the origins that they may come from.

    Without an API key and without client certificates, only the network protects the router, so the Host must be one of
    its names. With a key or certificates, any Host is admitted, because a rebound page has neither to show.
    """

    known_hosts: set[bytes] | None
    """Host headers that were already admitted, or None if any Host is admitted."""

    def __init__(self, config: Config) -> None:
        """Read the rules from the settings, and raise SettingError if the list of allowed hosts is not valid."""
        self._hosts = allowed_hosts(config.allowed_hosts)
        self._own_name = plain_name(config.host)
        self._is_local = _is_loopback(config.host)
        self._origins = frozenset(origin.encode() for origin in config.cors_origins)
        self._any_origin = ANY_ORIGIN in config.cors_origins
        guarded = any((config.api_key, config.api_keys_file, config.tls_client_ca))
        self.known_hosts = None if guarded else set()

    def host_problem(self, host: bytes) -> str | None:
        """Return why a request with this Host header, which `HOST` matches, is refused, or None if it is admitted.

        An empty or absent Host is admitted, because browsers always send one.
        """
        if not host or self.known_hosts is None or host in self.known_hosts:
            return None
        matched = HOST.match(host)
        name = "" if matched is None else matched[1].decode("ascii").removeprefix("[").removesuffix("]")
        if not self._admits(name):
            reached_by = "localhost" if self._is_local else "an IP address of it"
            return (
                f"{name[:SHOWN_CHARS]} in the Host header is no name of this router, so a web page may have had its own name "
                f"pointed here: ask for {reached_by}, or add the name to the router's setting allowed_hosts"
            )
        if len(self.known_hosts) < MAX_KNOWN_HOSTS:
            self.known_hosts.add(host)
        return None

    def origin_problem(self, method: str, host: bytes, origin: bytes, fetch_site: bytes) -> str | None:
        """Return why a request is refused because of the page that sent it, or None if it is admitted.

        The checks have the order of Go's net/http.CrossOriginProtection (1.25).

        Args:
            method: The HTTP method, in upper case.
            host: The Host header, empty where absent.
            origin: The Origin header, empty where absent.
            fetch_site: The Sec-Fetch-Site header, empty where absent.
        """
        if method in SAFE_METHODS or (origin and (self._any_origin or origin in self._origins)):
            return None
        is_own = fetch_site in OWN_SITES if fetch_site else not origin or _authority_of(origin) == host.lower()
        if is_own:
            return None
        return (
            "a web page of another origin had this request sent, which changes what this router holds or does: allow its "
            "origin with the router's setting cors_origins, or send the request from a program"
        )

    def _admits(self, name: str) -> bool:
        if _is_loopback(name) or self._hosts.holds(name):
            return True
        if self._is_local:
            return False
        return address_of(name) is not None or plain_name(name) == self._own_name


def _is_loopback(host: str) -> bool:
    address = address_of(host)
    if address is not None:
        return address.is_loopback
    name = plain_name(host)
    # RFC 6761: names below localhost also mean this machine.
    return name == "localhost" or name.endswith(".localhost")


def _authority_of(origin: bytes) -> bytes | None:
    """Return host and port of an origin in the form of a Host header, or None if the origin has none (`null`)."""
    try:
        authority = urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        return None
    return authority.lower().encode("latin-1") or None
