# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine's HTTP URL, split once for each registered URL. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

DEFAULT_PORTS = {"http": 80, "https": 443}


class Target(msgspec.Struct, frozen=True):
    """The destination of requests to one engine."""

    # The host name or address to connect to.
    host: str
    port: int
    tls: bool
    # The value of the Host header.
    authority: bytes
    # The path of the URL, without a slash at its end.
    prefix: bytes

    @property
    def origin(self) -> tuple[str, int, bool]:
        """The key of interchangeable connections: host, port and whether TLS is used."""
        return self.host, self.port, self.tls

    @property
    def host_port(self) -> bytes:
        """`host:port`, which includes the port even if it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("ascii" if host.isascii() else "idna")


def target_of(url: str) -> Target:
    """Return the target of a URL in which `worker_spec.url_problem` finds no problem."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return Target(
        host=parts.hostname,
        port=parts.port or DEFAULT_PORTS[parts.scheme],
        tls=parts.scheme == "https",
        authority=parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii"),
        prefix=parts.path.rstrip("/").encode("ascii", "ignore"),
    )
