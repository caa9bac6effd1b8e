# SPDX-License-Identifier: Apache-2.0
"""The rule for which engines get the key of the setting `worker_api_key`. Pure.

A client that may register a worker names the address to which the key would be sent, so it could read the key there.
Therefore the key is sent only to hosts that `allow_hosts` lists, and to engines that the operator named by a flag, a
file, or a label in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import PRECEDENCE, REGISTER

OPERATORS_SOURCES = frozenset(PRECEDENCE) - {REGISTER}
# Host, port and whether TLS is used, as in `Target.origin` of `upstream/origin.py`.
Origin = tuple[str, int, bool]

# The most workers that one message names.
SHOWN_WORKERS = 5


class EngineKey:
    """The engines' API key, and the origins that get it according to the present registrations."""

    def __init__(
        self, key: str | None, allowed: AllowList, registrations: Callable[[], Sequence[Registration]] = tuple
    ) -> None:
        """Take the sources of the rule; `registrations` is first called when a header is requested.

        Args:
            key: The API key, or None if no key is set.
            allowed: The hosts that `allow_hosts` lists.
            registrations: Returns the present registrations, and the same sequence until one of them changes.
        """
        self._header = None if key is None else f"Bearer {key}"
        self.allowed = allowed
        self.registrations = registrations
        self._seen: Sequence[Registration] | None = None
        self._named: frozenset[Origin] = frozenset()
        self._known: dict[Origin, bool] = {}

    @property
    def is_set(self) -> bool:
        """Whether there is a key at all."""
        return self._header is not None

    def header_for_url(self, url: str, *, named: bool = False) -> str | None:
        """Return the `Authorization` header of a request to the engine at a valid URL, or None if it gets no key.

        Args:
            url: The HTTP address of the engine.
            named: Whether the caller knows that the operator named the engine.
        """
        return None if self._header is None else self.header_for(_origin_of(url), named=named)

    def header_for(self, origin: Origin, *, named: bool = False) -> str | None:
        """Return the `Authorization` header of a request to an origin, as `header_for_url` does for a URL."""
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
        """Return the ids of the workers that may be reached over HTTP and get no key, each id once."""
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
        """Return the reason why engines may answer 401, if some of them get no key."""
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
        # Hosts of former registrations must not pile up.
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
