# SPDX-License-Identifier: Apache-2.0
"""API keys: the keys that the settings define, and the key that a request holds. Pure.

Only digests are kept, so that no key from the file can reach a log, an error or a dump.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.yaml_text import read_yaml
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.access.scope import ASK_PARTS, Scope

# Each request is compared with every key, at about 150 ns per key, and each key has its own series in /metrics.
MAX_KEYS = 64
# Shorter keys can be guessed.
MIN_KEY_CHARS = 16
# The names that /metrics shows for the key of the setting `api_key`, and for keys that are not known.
SETTING_NAME, UNKNOWN_NAME = "api_key", "unknown"

FORM = "write `keys:` and below it entries like `- {name: gateway, scopes: [ask], sha256: HEX}`"


# The name of a model or of a tenant, or a cache salt.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the key file, which has either `key` or `sha256`."""

    # The pattern ends with `$(?!\n)` because `$` alone also matches before a newline at the end.
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$(?!\n)")]
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    # The key in plain text, of at least `MIN_KEY_CHARS` characters.
    key: str | None = None
    # The key's SHA-256 in hexadecimal.
    sha256: str | None = None
    # The models that the key may name; None admits any.
    models: Annotated[list[Name], msgspec.Meta(min_length=1)] | None = None
    # The cache salts that the key may use; None admits any.
    cache_salts: Annotated[list[Name], msgspec.Meta(min_length=1)] | None = None
    # The cache salt that prompts without a salt get. Apart from it, the key may use only those of `cache_salts`.
    cache_salt: Name | None = None
    # The tenant whose salt the router makes for the key's prompts; None makes the key a tenant of its own.
    tenant: Name | None = None
    # Whether the key is that of a gateway whose requests name their tenants in the header of `tenant_header`.
    names_tenants: bool = False


class ApiKey(msgspec.Struct, frozen=True):
    """One API key and its rights. The key itself is not kept."""

    name: str
    scopes: frozenset[Scope]
    # The SHA-256 of the key, in 32 bytes.
    digest: bytes
    # The models and cache salts that the key may name.
    bounds: KeyBounds
    # Whether requests with the key name their tenants.
    names_tenants: bool = False

    def may(self, wanted: frozenset[Scope]) -> bool:
        """Return whether the key has at least one of the wanted scopes."""
        if Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(wanted):
            return True
        return Scope.ASK in self.scopes and not ASK_PARTS.isdisjoint(wanted)


class ApiKeys:
    """An immutable set of all API keys that admit a request at one time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [key.name for key in self._keys]

    def holder(self, authorization: str) -> ApiKey | None:
        """Return the key in a request's `Authorization` header, or None if the header has no key or an unknown one."""
        scheme, _, credentials = authorization.partition(" ")
        digest = digest_of(credentials.strip())
        holder: ApiKey | None = None
        # Compare in constant time, and with every key: the duration must not reveal how much of which key was right.
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                holder = key
        return holder if scheme.lower() == "bearer" else None


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def setting_key(key: str) -> ApiKey:
    """Return the key of the setting `api_key`, which has every right."""
    return ApiKey(SETTING_NAME, frozenset({Scope.ADMIN}), digest_of(key), KeyBounds(SETTING_NAME))


def parse_keys(text: str, where: str) -> list[ApiKey]:
    """Return the keys that the text of a key file lists.

    Raises SettingError, whose message contains no part of a key.

    Args:
        text: The content of the file, in YAML.
        where: The name of the file in error messages.
    """
    content: Any = read_yaml(text, where, FORM)
    entries = content.get("keys") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise SettingError(f"{where} lists no keys: {FORM}")
    if len(entries) > MAX_KEYS:
        raise SettingError(f"{where} lists {len(entries)} keys; at most {MAX_KEYS} are taken")
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        key = _key_of(entry, f"{where} key {number}")
        _check_single(key, keys, f"{where} key {number}")
        keys.append(key)
    return [_fenced(key, keys) for key in keys]


def _fenced(key: ApiKey, keys: Sequence[ApiKey]) -> ApiKey:
    """Return the key without access to other keys' `cache_salt`, or unchanged if it may use only salts of its own."""
    salts = {other.bounds.cache_salt for other in keys} - {None}
    if not salts or key.bounds.cache_salts is not None:
        return key
    bounds = msgspec.structs.replace(key.bounds, foreign_salts=frozenset(filter(None, salts)))
    return msgspec.structs.replace(key, bounds=bounds)


def _key_of(entry: Any, where: str) -> ApiKey:
    try:
        key_entry = msgspec.convert(entry, KeyEntry)
    except msgspec.ValidationError:
        # The message of msgspec may quote a value, and so a key.
        raise SettingError(
            f"{where} is no key: it needs `name` (letters, digits, `._-`), `scopes` (of {', '.join(Scope)}), and `key` or "
            "`sha256` as quoted text, and besides these at most `models` and `cache_salts`, lists of text, `cache_salt` and "
            "`tenant`, texts, and `names_tenants`, true or false"
        ) from None
    if key_entry.name in (SETTING_NAME, UNKNOWN_NAME):
        raise SettingError(f"{where}: the name {key_entry.name} is taken; write another one")
    if (key_entry.key is None) == (key_entry.sha256 is None):
        raise SettingError(f"{where} ({key_entry.name}) needs either `key` or `sha256`")
    if key_entry.sha256 is not None:
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", key_entry.sha256):
            raise SettingError(f"{where} ({key_entry.name}): write the 64 hex digits of the key's SHA-256 as `sha256`")
        digest = bytes.fromhex(key_entry.sha256)
    else:
        assert key_entry.key is not None
        if not re.fullmatch(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},}}", key_entry.key):
            raise SettingError(
                f"{where} ({key_entry.name}): write a key of {MIN_KEY_CHARS} or more printable ASCII characters without spaces"
            )
        digest = digest_of(key_entry.key)
    if key_entry.names_tenants and key_entry.tenant is not None:
        raise SettingError(f"{where} ({key_entry.name}) has `tenant` and `names_tenants`: keep one of them")
    scopes = frozenset(key_entry.scopes)
    return ApiKey(key_entry.name, scopes, digest, _bounds_of(key_entry, where), key_entry.names_tenants)


def _bounds_of(entry: KeyEntry, where: str) -> KeyBounds:
    if entry.models is None and entry.cache_salts is None and entry.cache_salt is None:
        return KeyBounds(entry.name, tenant=entry.tenant)
    if not {Scope.ASK, *ASK_PARTS}.issuperset(entry.scopes):
        raise SettingError(
            f"{where} ({entry.name}) has `models`, `cache_salt` or `cache_salts`, which restrict only questions and requests: "
            "give it only the scopes ask, proxy or hits, and use another key for other scopes"
        )
    models = None if entry.models is None else frozenset(entry.models)
    salts = frozenset([*(entry.cache_salts or ()), *([] if entry.cache_salt is None else [entry.cache_salt])])
    return KeyBounds(entry.name, models, salts or None, entry.cache_salt, tenant=entry.tenant)


def _check_single(key: ApiKey, others: Sequence[ApiKey], where: str) -> None:
    for other in others:
        if other.name == key.name:
            raise SettingError(f"{where}: the name {key.name} is there twice; give each key its own")
        if other.digest == key.digest:
            raise SettingError(f"{where} ({key.name}) is the same key as {other.name}; give each its own")
