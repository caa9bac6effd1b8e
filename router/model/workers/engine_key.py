# SPDX-License-Identifier: Apache-2.0
"""The keys of engines, and the rule for which engine gets one. Pure.

A client that may register a worker names the address to which the key would be sent, so it could read the key there.
Therefore a key is sent only to hosts that `allow_hosts` lists, and to engines that the operator named by a flag, a file,
or a label in Kubernetes. A registration contains the name of its key, never the key.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.yaml_text import read_yaml
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import PRECEDENCE, REGISTER
from kvrouter.router.model.workers.worker_spec import key_name_problem

OPERATORS_SOURCES = frozenset(PRECEDENCE) - {REGISTER}
# Host, port and whether TLS is used, as in `Target.origin` of `upstream/origin.py`.
Origin = tuple[str, int, bool]

# The most workers that one message names.
SHOWN_WORKERS = 5

# The name of the key for workers that name none.
DEFAULT = "default"
# One key for each worker, at the largest value of `max_workers`.
MAX_KEYS = 6_000
FORM = 'write lines like `default: "KEY"` and `NAME: "KEY"`'

NO_KEYS: Mapping[str, str] = MappingProxyType({})


def parse_engine_keys(text: str, where: str) -> dict[str, str]:
    """Return the keys in the text of a file, by name.

    Raises SettingError, whose message contains no part of a key.

    Args:
        text: The content of the file, in YAML.
        where: The name of the file in error messages.
    """
    content: Any = read_yaml(text, where, FORM)
    if not isinstance(content, dict) or not content:
        raise SettingError(f"{where} lists no keys: {FORM}")
    if len(content) > MAX_KEYS:
        raise SettingError(f"{where} lists {len(content)} keys; at most {MAX_KEYS} are allowed")
    for number, (name, key) in enumerate(content.items(), 1):
        if not isinstance(name, str) or key_name_problem(name):
            raise SettingError(f"{where}: the name of key {number} has other characters than letters, digits and ._-")
        if not isinstance(key, str) or not re.fullmatch(r"[\x21-\x7e]+", key):
            raise SettingError(f"{where}: write the key {name} as quoted text of printable ASCII without spaces")
    return content


class EngineKey:
    """The engines' API keys, and the origins to which the present registrations allow one to be sent."""

    def __init__(
        self, key: str | None, allowed: AllowList, registrations: Callable[[], Sequence[Registration]] = tuple
    ) -> None:
        """Take the sources of the rule; `registrations` is first called when a header is requested.

        Args:
            key: The API key of workers that name none, or None if no key is set.
            allowed: The hosts that `allow_hosts` lists.
            registrations: Returns the present registrations, and the same sequence until one of them changes.
        """
        self.take(key)
        self.allowed = allowed
        self.registrations = registrations
        self._seen: Sequence[Registration] | None = None
        self._named: frozenset[Origin] = frozenset()
        # The name of the key for each origin whose registration names one, and for each that the operator named.
        self._names: dict[Origin, str] = {}
        self._known: dict[Origin, bool] = {}
        # Reads the keys again if their file has changed. None if they do not come from a file.
        self.reader: Callable[[], Awaitable[object]] | None = None

    async def refresh(self) -> None:
        """Read the keys again if their file has changed. Call this when an engine refuses the key that it was sent."""
        if self.reader is not None:
            await self.reader()

    def take(self, key: str | None, by_name: Mapping[str, str] = NO_KEYS) -> None:
        """Replace all keys.

        Args:
            key: The API key of workers that name none, or None. An entry of `by_name` called DEFAULT takes precedence.
            by_name: The keys that workers name.
        """
        keys = ({} if key is None else {DEFAULT: key}) | dict(by_name)
        self._headers = {name: f"Bearer {key}" for name, key in keys.items()}

    @property
    def is_set(self) -> bool:
        """Whether there is a key at all."""
        return bool(self._headers)

    def header_for_url(self, url: str, *, named: bool = False, name: str | None = None) -> str | None:
        """Return the `Authorization` header of a request to the engine at a valid URL, or None if it gets no key.

        Args:
            url: The HTTP address of the engine.
            named: Whether the caller knows that the operator named the engine.
            name: The name of its key, if it is not registered yet. A client's engine gets it only if the operator did not
                name an engine at the same origin.
        """
        return self.header_for(_origin_of(url), named=named, name=name) if self._headers else None

    def header_for(self, origin: Origin, *, named: bool = False, name: str | None = None) -> str | None:
        """Return the `Authorization` header of a request to an origin, as `header_for_url` does for a URL."""
        if not self._headers:
            return None
        self._follow()
        if name is None or (origin in self._named and not named):
            name = self._names.get(origin, DEFAULT)
        # An engine whose key is missing gets no key at all, because the default key would reveal another engine's key.
        header = self._headers.get(name)
        if header is None or named or origin in self._named:
            return header
        listed = self._known.get(origin)
        if listed is None:
            listed = self._known[origin] = self.allowed.lists(origin[0])
        return header if listed else None

    def withheld(self) -> list[str]:
        """Return the ids of the workers that may be reached over HTTP and whose key is withheld, each id once."""
        workers = {
            registration.worker.worker_id
            for registration in self.registrations()
            if registration.url is not None
            and self.allowed.problem(registration.url) is None
            and self.header_for_url(registration.url) is None
            and self.header_for_url(registration.url, named=True) is not None
        }
        return sorted(workers)

    def missing(self) -> dict[str, list[str]]:
        """Return the workers whose key is not known here, by the key's name."""
        workers: dict[str, set[str]] = {}
        for registration in self.registrations():
            name = registration.engine_key
            if name is not None and name not in self._headers:
                workers.setdefault(name, set()).add(registration.worker.worker_id)
        return {name: sorted(ids) for name, ids in sorted(workers.items())}

    def health(self) -> list[str]:
        """Return the reasons why engines may answer 401, if some of them get no key."""
        problems = [
            f"engine key {name} of workers {_listed(workers)} is not in this router's worker_api_keys_file: add it"
            for name, workers in self.missing().items()
        ]
        workers = self.withheld()
        if workers:
            problems.append(
                f"worker_api_key is not sent to {len(workers)} workers ({_listed(workers)}), which clients registered at hosts "
                "that allow_hosts does not list: list them, or name the workers in the settings"
            )
        return problems

    def _follow(self) -> None:
        registrations = self.registrations()
        if registrations is self._seen:
            return
        self._seen = registrations
        # Forget the hosts of former registrations; otherwise their number would only grow.
        self._known.clear()
        self._named = frozenset(
            _origin_of(registration.url)
            for registration in registrations
            if registration.source in OPERATORS_SOURCES and registration.url is not None
        )
        self._names.clear()
        # The operator's own registrations come last, so that they decide which key an origin gets, even if they name none.
        # Among the operator's, those that name a key come last.
        for registration in sorted(
            registrations, key=lambda found: (found.source in OPERATORS_SOURCES, found.engine_key is not None)
        ):
            is_operators = registration.source in OPERATORS_SOURCES
            if registration.url is not None and (is_operators or registration.engine_key is not None):
                self._names[_origin_of(registration.url)] = registration.engine_key or DEFAULT


def _origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls


def _listed(workers: Sequence[str]) -> str:
    return ", ".join(map(repr, workers[:SHOWN_WORKERS])) + (" ..." if len(workers) > SHOWN_WORKERS else "")
