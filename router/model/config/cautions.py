# SPDX-License-Identifier: Apache-2.0
"""Risks of a configuration that works so far. /health lists them beside its reasons, but does not degrade. Pure."""

from __future__ import annotations

import ipaddress

from kvrouter.router.model.config.settings import Config


def open_to_all(config: Config) -> str | None:
    """Return the caution that every client that reaches this machine may use the router, or None if it does not hold."""
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
    """Return the caution that any web page in a browser may use the router, or None if it does not hold."""
    if "*" not in config.cors_origins or config.api_key or config.api_keys_file:
        return None
    return (
        "cors_origins is * and there is no API key: any web page in a browser that reaches this router may read the fleet and "
        "register workers; list the origins, or set api_key"
    )


def evicting(server: str, policy: str) -> str | None:
    """Return the caution that a Redis server may evict keys of the index, or None if it never evicts keys.

    Args:
        server: The address of the server.
        policy: Its maxmemory-policy, or "" if it is not known.
    """
    if policy in ("", "noeviction"):
        return None
    return (
        f"Redis at {server} evicts keys (maxmemory-policy {policy}): blocks would vanish from the index unnoticed, and "
        "routers that load it would predict too little; set maxmemory-policy noeviction"
    )
