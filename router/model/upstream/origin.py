# SPDX-License-Identifier: Apache-2.0
"""Where an engine's HTTP is, taken apart once for each registered URL. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

DEFAULT_PORTS = {"http": 80, "https": 443}


class Target(msgspec.Struct, frozen=True):
    """host: as it is connected to. authority: what the Host header says. prefix: the URL's own path, without a last
    slash."""

    host: str
    port: int
    tls: bool
    authority: bytes
    prefix: bytes

    @property
    def origin(self) -> tuple[str, int, bool]:
        """Connections to one origin are interchangeable."""
        return self.host, self.port, self.tls

    @property
    def host_port(self) -> bytes:
        """`host:port`, the port always given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("ascii" if host.isascii() else "idna")


def target_of(url: str) -> Target:
    """The target of a URL that `worker_spec.url_problem` has nothing against."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return Target(
        host=parts.hostname,
        port=parts.port or DEFAULT_PORTS[parts.scheme],
        tls=parts.scheme == "https",
        authority=parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii"),
        prefix=parts.path.rstrip("/").encode("ascii", "ignore"),
    )
