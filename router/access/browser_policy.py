# SPDX-License-Identifier: Apache-2.0
"""Which requests are refused because any page in somebody's browser could have made the browser send them. Pure.

Two attacks need no key and no access to the network but the browser's:

- DNS rebinding: a page's own name is pointed at this router's address, so the browser takes the router for the page's
  site and lets its scripts read the answers. The request's Host then names that site.
- Cross-site request forgery: a page sends a request that changes something here, without reading the answer. The
  browser says so in Origin and Sec-Fetch-Site, which no script can set.

Clients that are no browsers send the Host that they were given, and neither of the other two."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from kvrouter.router.common.host_list import address_of, allowed_hosts, plain_name
from kvrouter.router.config.settings import Config

# uri-host [":" port]; empty where the target has no authority.
HOST = re.compile(rb"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?\Z")

# They change nothing, and a page of another origin cannot read their answers (`api/http/cors.py`).
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# What browsers say of requests by their user (`none`) and by pages of this router.
OWN_SITES = frozenset({b"same-origin", b"none"})
ANY_ORIGIN = "*"

# Host headers that were admitted and are remembered for the short way past the general parser: one for each name and
# address of the router that clients use. A page that tries many names has none of them admitted.
MAX_KNOWN_HOSTS = 256
# Names as they stand in an error.
SHOWN_CHARS = 80


class BrowserPolicy:
    """The hosts that requests may name and the origins that they may come from.

    Without an API key and without certificates of clients, the Host must be a name of this router: what reaches the
    router is then all that protects it. With either, a page that was rebound has nothing to show."""

    known_hosts: set[bytes] | None
    """Host headers that were admitted already; None where any is."""

    def __init__(self, config: Config) -> None:
        """Raises SettingError."""
        self._hosts = allowed_hosts(config.allowed_hosts)
        self._own_name = plain_name(config.host)
        self._is_local = _is_loopback(config.host)
        self._origins = frozenset(origin.encode() for origin in config.cors_origins)
        self._any_origin = ANY_ORIGIN in config.cors_origins
        guarded = any((config.api_key, config.api_keys_file, config.tls_client_ca))
        self.known_hosts = None if guarded else set()

    def host_problem(self, host: bytes) -> str | None:
        """Return why a request with this Host header, which HOST matches, is refused; None where it is admitted.

        An empty one is admitted, like none: browsers always name a host."""
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
        """Return why a request is refused for the page that had it sent; None where it is admitted.

        host, origin, fetch_site: the headers Host, Origin and Sec-Fetch-Site, empty where absent. The order of the
        questions is that of Go's net/http.CrossOriginProtection (1.25)."""
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
    # RFC 6761: names below localhost are this machine too.
    return name == "localhost" or name.endswith(".localhost")


def _authority_of(origin: bytes) -> bytes | None:
    """Return host and port of an origin as its page's requests have them in Host; None where it has none (`null`)."""
    try:
        authority = urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        return None
    return authority.lower().encode("latin-1") or None
