# SPDX-License-Identifier: Apache-2.0
"""The address at which vLLM's own p2p tier lends blocks, as a user registers it. Pure.

That tier declares nothing, so the facts that two engines must share to exchange blocks are those of their events.
"""

from __future__ import annotations

from functools import lru_cache

from xxhash import xxh3_64_hexdigest

from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.kvcache.offload_connectors import TierRule
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.worker_spec import MAX_PORT, peer_address

# Engines with this project's tier exchange no blocks with those that have vLLM's.
KIND = "vllm-p2p"
# More workers than a router follows.
MAX_ADDRESSES = 8_192


def registered_peer(
    registration: Registration, catalog: Catalog | None, scheme: HashScheme | None
) -> PeerAddress | None:
    """Return where a worker's engine lends blocks by its registration, or None if that is not registered or not usable.

    It is usable once it is known how the engine hashes blocks and which chunks its CPU tier keeps. vLLM compares model,
    block sizes and hash seed when two engines connect, and reports no resets.

    Args:
        registration: The worker's registration.
        catalog: The worker's KV cache groups.
        scheme: The way in which its engine hashes blocks, or None if that is not known.
    """
    if registration.peer is None or catalog is None or scheme is None:
        return None
    if catalog.problem is not None or catalog.blocks_per_chunk is None or catalog.offload.rule is not TierRule.CHUNKS:
        return None
    host, port = peer_address(registration.peer, registration.worker.dp_rank)
    if port > MAX_PORT:
        # A source of workers may list more ranks than there are ports.
        return None
    groups = [(group.group_idx, group.kind, group.block_size) for group in catalog.groups]
    facts = (scheme.algo, scheme.none_hash, scheme.lookahead, catalog.hash_block_size, catalog.blocks_per_chunk, groups)
    return _address(host, port, xxh3_64_hexdigest(repr(facts).encode()))


def is_vllms(address: PeerAddress) -> bool:
    """Return whether the address is that of vLLM's own p2p tier, which knows no hand-over of a cache."""
    return address.exchange.startswith(f"{KIND}:")


@lru_cache(MAX_ADDRESSES)
def _address(host: str, port: int, digest: str) -> PeerAddress:
    """Return the address, as the same object as long as nothing changes."""
    return PeerAddress(host, port, f"{KIND}:{digest}")
