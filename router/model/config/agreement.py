# SPDX-License-Identifier: Apache-2.0
"""The settings that all routers on one store should share, as texts that heartbeats may carry. Pure."""

from __future__ import annotations

import hashlib

from kvrouter.router.model.config.settings import Config

# What decides hits, choices, and who follows what: with different values, the answer depends on the router that a
# client happens to reach.
AGREED = (
    "approximate_ttl_s",
    "handover_token_cost",
    "lease_ttl_s",
    "max_workers",
    "policy",
    "remote_prefill_min_tokens",
    "saturation_tokens",
    "suspect_credit_s",
    "temperature",
)
AGREED_LISTS = ("allow_hosts", "model_aliases")
# Of a secret, or a file of some, it is only said whether there is one.
AGREED_SECRETS = ("api_key", "api_keys_file", "worker_api_key")
# Enough to see a difference; the seed itself stays here.
DIGEST_CHARS = 12


def agreed_settings(config: Config) -> dict[str, str]:
    """By name; the same text where routers agree."""
    found = {name: str(getattr(config, name)) for name in AGREED}
    found |= {name: " ".join(sorted(getattr(config, name))) or "none" for name in AGREED_LISTS}
    found |= {name: "none" if getattr(config, name) is None else "set" for name in AGREED_SECRETS}
    seed = config.none_hash_seed
    digest = None if seed is None else hashlib.sha256(seed.encode("utf-8", "surrogatepass")).hexdigest()
    found["none_hash_seed"] = "none" if digest is None else f"one with digest {digest[:DIGEST_CHARS]}"
    return found
