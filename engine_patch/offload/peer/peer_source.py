# SPDX-License-Identifier: Apache-2.0
"""The engine that a request names as the source of its missing chunks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# The field of `kv_transfer_params` that names the source, and its own fields, are those of vLLM's p2p tier, so a router
# names a source in one way for both. vLLM's `kv_request_id` is not needed here.
# Source: vLLM 0.33, module `vllm.v1.kv_offload.tiering.p2p.manager`, _parse_source.
FIELD = "remote_kv_source"
MAX_PORT = 65_535
# No name of a host is longer (RFC 1035).
MAX_HOST_CHARS = 253


class PeerSource(NamedTuple):
    """The address at which an engine lends its chunks."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The address in the form of ZMQ."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class SourceWish(NamedTuple):
    """A request's wish to fetch its missing chunks."""

    source: PeerSource
    # Seconds within which the chunks must arrive; None: the engine's setting.
    timeout_s: float | None = None


def source_wish(params: Mapping[str, Any] | None) -> SourceWish | None:
    """Return the wish in a request's `kv_transfer_params`, or None if it names no complete source."""
    given = params.get(FIELD) if isinstance(params, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    host, port, timeout_s = given.get("remote_host"), given.get("remote_port"), given.get("timeout_s")
    if isinstance(port, str) and port.isascii() and port.isdecimal():
        port = int(port)
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST_CHARS:
        return None
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
        return None
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
        timeout_s = None
    return SourceWish(PeerSource(host, port), timeout_s)
