# SPDX-License-Identifier: Apache-2.0
"""The engine that a request names as the source of its missing chunks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# The field of `kv_transfer_params` that names the source, and its own fields, are those of vLLM's p2p tier, so a router
# names a source in one way for both. vLLM's `kv_request_id` is not needed here.
# Source: vLLM 0.33, module `vllm.v1.kv_offload.tiering.p2p.manager`, _parse_source.
FIELD = "remote_kv_source"
# The action of a `KvHintsEnvelope` (vLLM 0.32 and later) that names the source; its payload has `host`, `port` and
# `timeout_s`. Actions of other types and versions are for others.
ACTION_TYPE = "kvrouter.fetch"
ACTION_VERSION = "1"
MAX_PORT = 65_535
# Python refuses to read numbers of thousands of digits.
MAX_PORT_DIGITS = 5
# A shorter wait would end before the answer of a source that is busy with a step of its own; a longer one would keep a
# client waiting that could have its answer computed.
MIN_TIMEOUT_S = 0.05
MAX_TIMEOUT_S = 60.0
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
    # Seconds within which the chunks must arrive, from MIN_TIMEOUT_S to MAX_TIMEOUT_S; None: the engine's setting.
    timeout_s: float | None = None


class Action(Protocol):
    """The fields of vLLM's `KvHintAction` that are used here."""

    @property
    def action_type(self) -> str:
        """The name of what is to be done."""
        ...

    @property
    def action_version(self) -> str:
        """The version of the payload."""
        ...

    @property
    def payload(self) -> Mapping[str, Any]:
        """The arguments."""
        ...


class Hints(Protocol):
    """The field of vLLM's `KvHintsEnvelope` that is used here."""

    @property
    def actions(self) -> Sequence[Action]:
        """The actions."""
        ...


def source_wish(params: Mapping[str, Any] | None, hints: Hints | None = None) -> SourceWish | None:
    """Return a request's wish, or None if it names no complete source.

    Args:
        params: The request's `kv_transfer_params`, whose source counts first.
        hints: The request's envelope of hints, whose first action with a complete source counts.
    """
    given = params.get(FIELD) if isinstance(params, Mapping) else None
    if isinstance(given, Mapping):
        wish = _wish(given.get("remote_host"), given.get("remote_port"), given.get("timeout_s"))
        if wish is not None:
            return wish
    for action in () if hints is None else hints.actions:
        if (action.action_type, action.action_version) != (ACTION_TYPE, ACTION_VERSION):
            continue
        payload = action.payload
        if isinstance(payload, Mapping):
            wish = _wish(payload.get("host"), payload.get("port"), payload.get("timeout_s"))
            if wish is not None:
                return wish
    return None


def _wish(host: object, port: object, timeout_s: object) -> SourceWish | None:
    if isinstance(port, str) and len(port) <= MAX_PORT_DIGITS and port.isascii() and port.isdecimal():
        port = int(port)
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST_CHARS:
        return None
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
        return None
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
        return SourceWish(PeerSource(host, port))
    return SourceWish(PeerSource(host, port), float(min(max(timeout_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)))
