# SPDX-License-Identifier: Apache-2.0
"""API keys: which there are, by a file's text and the setting `api_key`, and whose a request has. Pure.

Only digests are kept, so that no key of the file can reach a log, an error or a dump."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import yaml

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.access.scope import ASK_PARTS, Scope

# Each request is compared with all of them, at some 150 ns each; and each has series of its own in /metrics.
MAX_KEYS = 64
# Shorter ones can be guessed.
MIN_KEY_CHARS = 16
# The name of the setting's own key, and of those that are none, in /metrics.
SETTING_NAME, UNKNOWN_NAME = "api_key", "unknown"

FORM = "write `keys:` and below it entries like `- {name: gateway, scopes: [ask], sha256: HEX}`"


# A model's name or a salt.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file; either key or sha256."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$(?!\n)")]
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    key: str | None = None
    sha256: str | None = None
    models: Annotated[list[Name], msgspec.Meta(min_length=1)] | None = None
    cache_salts: Annotated[list[Name], msgspec.Meta(min_length=1)] | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """One API key with its rights; the key itself is not kept."""

    name: str
    scopes: frozenset[Scope]
    # The SHA-256 of the key.
    digest: bytes
    # The models and salts that it may name.
    bounds: KeyBounds

    def may(self, wanted: frozenset[Scope]) -> bool:
        """Return whether the key has one of these scopes."""
        if Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(wanted):
            return True
        return Scope.ASK in self.scopes and not ASK_PARTS.isdisjoint(wanted)


class ApiKeys:
    """All that admit, at one time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def names(self) -> list[str]:
        return [key.name for key in self._keys]

    def holder(self, authorization: str) -> ApiKey | None:
        """The key of a request's `Authorization`; None: it has none, or one that is not known."""
        scheme, _, given = authorization.partition(" ")
        digest = digest_of(given.strip())
        found: ApiKey | None = None
        # In constant time, and all of them: how long it takes must not show how much of which key was right.
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found if scheme.lower() == "bearer" else None


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def setting_key(key: str) -> ApiKey:
    """That of the setting `api_key`, which may do everything."""
    return ApiKey(SETTING_NAME, frozenset({Scope.ADMIN}), digest_of(key), KeyBounds(SETTING_NAME))


def parse_keys(text: str, where: str) -> list[ApiKey]:
    """The keys that a file's text lists. where: what to call it in an error, which holds nothing of a key. Raises
    SettingError."""
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise SettingError(f"{where}{line} is not YAML: {FORM}") from None
    entries = content.get("keys") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise SettingError(f"{where} lists no keys: {FORM}")
    if len(entries) > MAX_KEYS:
        raise SettingError(f"{where} lists {len(entries)} keys; at most {MAX_KEYS} are taken")
    found: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        key = _key_of(entry, f"{where} key {number}")
        _check_single(key, found, f"{where} key {number}")
        found.append(key)
    return found


def _key_of(entry: Any, where: str) -> ApiKey:
    try:
        given = msgspec.convert(entry, KeyEntry)
    except msgspec.ValidationError:
        # Its own text may quote a value.
        raise SettingError(
            f"{where} is no key: it needs `name` (letters, digits, `._-`), `scopes` (of {', '.join(Scope)}), and `key` or "
            "`sha256` as quoted text, and besides these at most `models` and `cache_salts`, lists of text"
        ) from None
    if given.name in (SETTING_NAME, UNKNOWN_NAME):
        raise SettingError(f"{where}: the name {given.name} is taken; write another one")
    if (given.key is None) == (given.sha256 is None):
        raise SettingError(f"{where} ({given.name}) needs either `key` or `sha256`")
    if given.sha256 is not None:
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", given.sha256):
            raise SettingError(f"{where} ({given.name}): write the 64 hex digits of the key's SHA-256 as `sha256`")
        digest = bytes.fromhex(given.sha256)
    else:
        assert given.key is not None
        if not re.fullmatch(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},}}", given.key):
            raise SettingError(
                f"{where} ({given.name}): write a key of {MIN_KEY_CHARS} or more printable ASCII characters without spaces"
            )
        digest = digest_of(given.key)
    return ApiKey(given.name, frozenset(given.scopes), digest, _bounds_of(given, where))


def _bounds_of(entry: KeyEntry, where: str) -> KeyBounds:
    if entry.models is None and entry.cache_salts is None:
        return KeyBounds(entry.name)
    if not {Scope.ASK, *ASK_PARTS}.issuperset(entry.scopes):
        raise SettingError(
            f"{where} ({entry.name}) has `models` or `cache_salts`, which bind questions and requests alone: give it the scopes "
            "ask, proxy or hits, and a key of its own for other ones"
        )
    models = None if entry.models is None else frozenset(entry.models)
    return KeyBounds(entry.name, models, None if entry.cache_salts is None else frozenset(entry.cache_salts))


def _check_single(key: ApiKey, others: Sequence[ApiKey], where: str) -> None:
    for other in others:
        if other.name == key.name:
            raise SettingError(f"{where}: the name {key.name} is there twice; give each key its own")
        if other.digest == key.digest:
            raise SettingError(f"{where} ({key.name}) is the same key as {other.name}; give each its own")
