# SPDX-License-Identifier: Apache-2.0
"""Risks of a configuration that works now: /health shows them beside its reasons; they degrade nothing. Pure."""

from __future__ import annotations

import ipaddress

from kvrouter.router.model.config.settings import Config


def open_to_all(config: Config) -> str | None:
    """Whether whoever reaches this machine may use the router."""
    try:
        everywhere = ipaddress.ip_address(config.host).is_unspecified
    except ValueError:
        everywhere = False
    if not everywhere or any((config.api_key, config.api_keys_file, config.tls_client_ca)):
        return None
    return (
        f"the router listens on {config.host} without an API key: whoever reaches this machine may send requests and register "
        "workers; set api_key, or another host"
    )


def open_to_pages(config: Config) -> str | None:
    """Return why any web page can use the router from a browser that reaches it, or None if none can."""
    if "*" not in config.cors_origins or config.api_key or config.api_keys_file:
        return None
    return (
        "cors_origins is * and there is no API key: any web page in a browser that reaches this router may read the fleet and "
        "register workers; list the origins, or set api_key"
    )


def evicting(server: str, policy: str) -> str | None:
    """Whether a Redis server may drop keys of the index. policy: its maxmemory-policy."""
    if policy in ("", "noeviction"):
        return None
    return (
        f"Redis at {server} evicts keys (maxmemory-policy {policy}): blocks would vanish from the index unnoticed, and "
        "routers that load it would predict too little; set maxmemory-policy noeviction"
    )
