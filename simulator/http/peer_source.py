# SPDX-License-Identifier: Apache-2.0
"""The source that a request names in `kv_transfer_params`, found among the replicas of this process by its HTTP port.

The field is that of vLLM's p2p tier and of the engine's own peer tier (docs/how-to/offload.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvrouter.simulator.cache.peer import Lender, PeerWish

SOURCE_FIELD = "remote_kv_source"
# How long a request waits that names no time; that of the engine's tier.
TIMEOUT_S = 1.0

# The replicas of a process that lend, by port. Each has the tier of its current life, None without a CPU tier.
Lenders = Mapping[int, Callable[[], Lender | None]]


def wish_of(params: Mapping[str, Any] | None, lenders: Lenders) -> PeerWish | None:
    """Return a request's wish; None if it names no source, or one that is not here. A wrong field counts as none."""
    source = params.get(SOURCE_FIELD) if params else None
    if not isinstance(source, dict):
        return None
    port, timeout_s = source.get("remote_port"), source.get("timeout_s", TIMEOUT_S)
    find = lenders.get(port) if isinstance(port, int) else None
    lender = None if find is None else find()
    if lender is None or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        return None
    return PeerWish(lender, float(timeout_s))
