# SPDX-License-Identifier: Apache-2.0
"""The flags of `vllm serve` that determine what a router can learn from an engine."""

from __future__ import annotations

import msgspec

from kvrouter.simulator.cache.hashing import DEFAULT_SEED


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of one engine process. The defaults are the values that a router needs."""

    # --kv-events-config: whether events are published.
    kv_events: bool = True
    # --enable-prefix-caching: whether blocks are kept for later prompts.
    prefix_caching: bool = True
    # --enable-prompt-tokens-details: whether usage has the cached tokens.
    prompt_tokens_details: bool = True
    # VLLM_USE_RUST_FRONTEND: whether the front end in Rust answers, as its /version says.
    rust_front_end: bool = False
    # The environment's PYTHONHASHSEED, which is the seed of the block hashes.
    hash_seed: str = DEFAULT_SEED


# The flags that docs/how-to/vllm.md recommends.
RECOMMENDED = EngineFlags()
