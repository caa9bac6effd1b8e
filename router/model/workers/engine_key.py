# SPDX-License-Identifier: Apache-2.0
"""The rule for which engines get the key of the setting `worker_api_key`. Pure.

A client that may register a worker names the address that the key would be sent to, so it could read the key there.
Therefore only hosts that `allow_hosts` lists get it, and engines that the operator named: by a flag, a file, or a label
in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import PRECEDENCE, REGISTER

OPERATORS_SOURCES = frozenset(PRECEDENCE) - {REGISTER}
# Host, port and whether over TLS: as in `upstream/origin.py`.
Origin = tuple[str, int, bool]

# How many workers a sentence names.
SHOWN_WORKERS = 5


class EngineKey:
    """The key, and the origins that may have it according to the present registrations."""

    def __init__(
        self, key: str | None, allowed: AllowList, registrations: Callable[[], Sequence[Registration]] = tuple
    ) -> None:
        """Ask for no registrations yet. registrations: returns the same sequence until a registration changes."""
        self._header = None if key is None else f"Bearer {key}"
        self.allowed = allowed
        self.registrations = registrations
        self._seen: Sequence[Registration] | None = None
        self._named: frozenset[Origin] = frozenset()
        self._known: dict[Origin, bool] = {}

    @property
    def is_set(self) -> bool:
        return self._header is not None

    def header_for_url(self, url: str, *, named: bool = False) -> str | None:
        """Return the `Authorization` of a request to the engine at a valid URL, None if it gets no key.

        named: whether the caller knows that the operator named the engine."""
        return None if self._header is None else self.header_for(_origin_of(url), named=named)

    def header_for(self, origin: Origin, *, named: bool = False) -> str | None:
        """Return the same for an origin."""
        if self._header is None:
            return None
        self._follow()
        if named or origin in self._named:
            return self._header
        listed = self._known.get(origin)
        if listed is None:
            listed = self._known[origin] = self.allowed.lists(origin[0])
        return self._header if listed else None

    def withheld(self) -> list[str]:
        """Return the ids of the workers that have an address and get no key, each once."""
        if self._header is None:
            return []
        workers = {
            registration.worker.worker_id
            for registration in self.registrations()
            if registration.url is not None
            and self.allowed.problem(registration.url) is None
            and self.header_for_url(registration.url) is None
        }
        return sorted(workers)

    def health(self) -> list[str]:
        """Return why engines answer 401, if some get no key."""
        workers = self.withheld()
        if not workers:
            return []
        shown = ", ".join(map(repr, workers[:SHOWN_WORKERS])) + (" ..." if len(workers) > SHOWN_WORKERS else "")
        return [
            f"worker_api_key is not sent to {len(workers)} workers ({shown}), which clients registered at hosts that allow_hosts "
            "does not list: list them, or name the workers in the settings"
        ]

    def _follow(self) -> None:
        registrations = self.registrations()
        if registrations is self._seen:
            return
        self._seen = registrations
        # Forget the hosts of registrations that are gone.
        self._known.clear()
        self._named = frozenset(
            _origin_of(registration.url)
            for registration in registrations
            if registration.source in OPERATORS_SOURCES and registration.url is not None
        )


def _origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls
