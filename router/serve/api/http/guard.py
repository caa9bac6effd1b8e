# SPDX-License-Identifier: Apache-2.0
"""The admission of a request before its body is read.

It checks the request's host and origin, its key, the scopes of its route, and the rate of registrations.
"""

from __future__ import annotations

from collections.abc import Collection

from kvrouter.router.base.common.errors import (
    BadQuestion,
    Forbidden,
    ForeignHost,
    ForeignOrigin,
    RouterError,
    TooManyRegistrations,
    Unauthorized,
)
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.access.access_metrics import (
    ADMITTED,
    FORBIDDEN,
    FOREIGN_HOST,
    FOREIGN_ORIGIN,
    LIMITED,
    UNAUTHORIZED,
)
from kvrouter.router.serve.access.api_keys import UNKNOWN_NAME
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.access.scope import Scope
from kvrouter.router.serve.access.tenants import Tenants
from kvrouter.router.serve.api.http.request import HttpRequest
from kvrouter.router.serve.api.scopes import REGISTER, RouteTable, Scopes

# The prefixes of routes that register. Without keys, only these are looked up.
REGISTERING = ("/register", "/unregister", "/workers")
# The number of characters of a path that an error shows.
SHOWN_CHARS = 80


class Guard:
    """The guard of the HTTP port. `open_paths` are admitted without a key."""

    def __init__(self, access: Access, routes: RouteTable, open_paths: Collection[str]) -> None:
        self._access = access
        self._routes = routes
        self._open_paths = open_paths

    @property
    def wants_key(self) -> bool:
        """Whether requests need an API key."""
        return self._access.keys is not None

    @property
    def reads_heads(self) -> bool:
        """Whether the head of each request is needed for a key or a tenant, too, and not only for the path."""
        return self._access.keys is not None or self._access.tenants is not None

    @property
    def known_hosts(self) -> set[bytes] | None:
        """The Host headers that were already admitted, or None if any is."""
        return self._access.browsers.known_hosts

    def refusal(self, request: HttpRequest) -> RouterError | None:
        """Return why a request is refused, or None if it is admitted, and count the outcome."""
        return self._foreign(request) or self._unpermitted(request)

    def _foreign(self, request: HttpRequest) -> RouterError | None:
        """Return why a request is refused because a web page may have caused it, or None."""
        if not (request.host or request.origin or request.fetch_site):
            # The fast path has already judged the request, or the request names no host.
            return None
        browsers, counts = self._access.browsers, self._access.metrics.foreign
        problem = browsers.host_problem(request.host)
        if problem is not None:
            counts[FOREIGN_HOST].inc()
            return ForeignHost(problem)
        problem = browsers.origin_problem(request.method, request.host, request.origin, request.fetch_site)
        if problem is not None:
            counts[FOREIGN_ORIGIN].inc()
            return ForeignOrigin(problem)
        return None

    def _unpermitted(self, request: HttpRequest) -> RouterError | None:
        """Return why a request is refused because of its key, its scopes or its rate, or None."""
        method, path = request.method, request.path
        keys, tenants = self._access.keys, self._access.tenants
        if keys is None:
            if tenants is not None and (unnamed := _tenant_refusal(request, tenants, tenants.keyless)) is not None:
                return unnamed
            if not path.startswith(REGISTERING) or self._routes.scopes(method, path) != REGISTER:
                return None
            return self._too_many("")
        if path in self._open_paths:
            return None
        holder = keys.holder(request.authorization)
        if holder is None:
            self._access.count(UNKNOWN_NAME, UNAUTHORIZED)
            return Unauthorized("this router wants its API key: send the header `Authorization: Bearer KEY`")
        request.bounds = holder.bounds
        wanted = self._routes.scopes(method, path)
        refused: RouterError | None = None
        outcome = ADMITTED
        if tenants is not None:
            refused = _tenant_refusal(request, tenants, holder.bounds)
        if not holder.may(wanted):
            outcome = FORBIDDEN
            refused = Forbidden(
                f"the API key {holder.name} has the scope {_named(holder.scopes)}, and {method} {printable(path[:SHOWN_CHARS])} "
                f"takes one with {_named(wanted)}: send another key, or add the scope in the router's api_keys_file"
            )
        elif wanted == REGISTER and refused is None:
            refused = self._too_many(holder.name)
            outcome = ADMITTED if refused is None else LIMITED
        self._access.count(holder.name, outcome)
        return refused

    def _too_many(self, key: str) -> TooManyRegistrations | None:
        """Return the error if registrations with this key come too fast, or None."""
        pause_s = self._access.registration_pause_s(key)
        if not pause_s:
            return None
        return TooManyRegistrations(
            "registrations come faster than this router takes them: send them again later, or raise its registrations_per_s",
            retry_after_s=pause_s,
        )


def _tenant_refusal(request: HttpRequest, tenants: Tenants, bounds: KeyBounds) -> BadQuestion | None:
    """Give the request the bounds of its tenant and return None, or return why its header names none."""
    try:
        request.bounds = tenants.bounds_of(bounds, request.headers)
    except BadQuestion as error:
        return error
    return None


def _named(scopes: Scopes) -> str:
    """Return the scopes as text, in their order. `admin` has all rights, so it is named only if it is alone."""
    shown = [scope.value for scope in Scope if scope in scopes and (scope is not Scope.ADMIN or len(scopes) == 1)]
    return " or ".join(shown)
