# SPDX-License-Identifier: Apache-2.0
"""The tenant of each request, for which the router makes cache salts. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvrouter.router.base.common.errors import BadQuestion, SettingError
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.api_keys import ApiKey
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.access.salt_maker import SaltMaker
from kvrouter.router.serve.access.scope import Scope

# Headers that have another meaning, so that they cannot name a tenant.
TAKEN = re.compile(
    r"(host|authorization|connection|expect|te|trailer|upgrade|keep-alive|accept|origin|last-event-id|x-request-id"
    r"|x-session-id|x-data-parallel-rank|(content|transfer|proxy|sec|x-kvrouter|x-prefiller)-.*)\Z"
)
# The scopes of keys that read the events of all tenants.
OPERATORS = frozenset({Scope.WATCH, Scope.ADMIN})
# The longest name of a tenant, as in the file of keys.
MAX_TENANT_BYTES = 512

Headers = Sequence[tuple[bytes, bytes]]


class Tenants:
    """The rule by which the tenant of a request is found, and the maker of the tenants' salts."""

    def __init__(self, maker: SaltMaker, header: str | None) -> None:
        """Take the maker, and the name of the header in which trusted clients name their tenants."""
        self.maker = maker
        self._header = header
        self._name = None if header is None else header.encode()
        # The bounds of a request without a key, before its tenant is known.
        self.keyless = KeyBounds("", maker=maker, tenant_header=header)

    def salted(self, key: ApiKey) -> ApiKey:
        """Return the key with salts that are made here."""
        header = self._header if key.names_tenants else None
        is_operators = not key.scopes.isdisjoint(OPERATORS)
        bounds = msgspec.structs.replace(key.bounds, maker=self.maker, tenant_header=header, is_operators=is_operators)
        return msgspec.structs.replace(key, bounds=bounds)

    def bounds_of(self, bounds: KeyBounds, headers: Headers) -> KeyBounds:
        """Return the bounds of one request: those of its key, with the tenant in its headers if the key names tenants.

        Raises BadQuestion if the header comes twice or cannot be read.
        """
        if bounds.tenant_header is None:
            return bounds
        values = [value for name, value in headers if name == self._name]
        if len(values) > 1:
            raise BadQuestion(
                f"there is more than one {self._header} header; send one: a gateway that names the tenant must remove what "
                "its client sent",
                code="repeated_header",
            )
        raw = values[0].strip() if values else b""
        if not raw:
            return bounds
        try:
            tenant = raw.decode()
        except UnicodeDecodeError:
            tenant = ""
        if not tenant or len(raw) > MAX_TENANT_BYTES:
            raise BadQuestion(
                f"the header {self._header} is no name of a tenant: send UTF-8, {MAX_TENANT_BYTES} bytes at most",
                code="tenant_missing",
            )
        return msgspec.structs.replace(bounds, tenant=tenant)


def secret_path(config: Config) -> Path | None:
    """Return the file with the secret, or None if clients name their salts themselves.

    Raises SettingError if the settings for tenants do not fit each other.
    """
    header, has_keys = config.tenant_header, config.api_key is not None or config.api_keys_file is not None
    if config.cache_salt_secret_file is None:
        if header is not None or config.client_salts != "ignore":
            name = "client_salts" if header is None else "tenant_header"
            raise SettingError(f"{name} needs cache_salt_secret_file, from which the router makes salts; set it, too")
        return None
    if header is not None and TAKEN.match(header):
        raise SettingError(f"tenant_header is {header}, which has another meaning; name another header, like x-tenant")
    if header is None and not has_keys:
        raise SettingError(
            "cache_salt_secret_file needs tenants: give API keys (api_keys_file), or name the header in which a trusted "
            "gateway names the tenant (tenant_header)"
        )
    if config.gateway_port is not None and header is None:
        raise SettingError(
            "gateway_port has no API keys, so cache_salt_secret_file needs the header in which the gateway names the tenant: "
            "set tenant_header"
        )
    if config.gateway_port is not None and config.gateway_translated_paths:
        raise SettingError(
            "gateway_translated_paths and cache_salt_secret_file exclude each other: a body that is translated after the pick "
            "may lose its cache_salt, and tenants would share one cache; leave one of them out"
        )
    return Path(config.cache_salt_secret_file)


def check_keys(keys: Sequence[ApiKey], config: Config) -> None:
    """Raise SettingError if the keys of the file do not fit the settings for tenants."""
    where = f"api_keys_file {config.api_keys_file}"
    makes_salts = config.cache_salt_secret_file is not None
    for key in keys:
        if makes_salts and (key.bounds.cache_salts is not None or key.bounds.cache_salt is not None):
            raise SettingError(
                f"{where} ({key.name}) has `cache_salt` or `cache_salts`, but cache_salt_secret_file makes all salts: leave "
                "them out; keys with the same `tenant` share a salt"
            )
        if not makes_salts and (key.bounds.tenant is not None or key.names_tenants):
            raise SettingError(
                f"{where} ({key.name}) has `tenant` or `names_tenants`, which have a meaning only with cache_salt_secret_file: "
                "set it, or leave them out"
            )
        if key.names_tenants and config.tenant_header is None:
            raise SettingError(
                f"{where} ({key.name}) has `names_tenants`, but no header is set for the names: set tenant_header"
            )
    is_read = config.gateway_port is not None or any(key.names_tenants for key in keys)
    if config.tenant_header is not None and not is_read:
        raise SettingError(
            "tenant_header would never be read, because no key has `names_tenants: true`: add this to the gateway's entry in "
            "api_keys_file"
        )
