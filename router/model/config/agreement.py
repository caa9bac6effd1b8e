# SPDX-License-Identifier: Apache-2.0
"""The settings on which all routers of one store should agree, as texts without secrets for heartbeats. Pure."""

from __future__ import annotations

import hashlib

from kvrouter.router.model.config.settings import Config

# Settings that affect hits, choices, and which router follows which worker. If they differ, an answer depends on the
# router that a client happens to reach.
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
# Secrets and files of secrets; the texts only show whether they are set.
AGREED_SECRETS = ("api_key", "api_keys_file", "worker_api_key", "worker_api_keys_file")
# Length of the digest that stands for the seed. It suffices to see a difference, and does not reveal the seed.
DIGEST_CHARS = 12


def agreed_settings(config: Config) -> dict[str, str]:
    """Return a text for each setting, by name. Two routers agree on a setting if they have the same text for it."""
    texts = {name: str(getattr(config, name)) for name in AGREED}
    texts |= {name: " ".join(sorted(getattr(config, name))) or "none" for name in AGREED_LISTS}
    texts |= {name: "none" if getattr(config, name) is None else "set" for name in AGREED_SECRETS}
    seed = config.none_hash_seed
    digest = None if seed is None else hashlib.sha256(seed.encode("utf-8", "surrogatepass")).hexdigest()
    texts["none_hash_seed"] = "none" if digest is None else f"one with digest {digest[:DIGEST_CHARS]}"
    return texts
