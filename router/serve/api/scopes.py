# SPDX-License-Identifier: Apache-2.0
"""Which scope of an API key each route takes. A route that is not here takes `admin` alone, and a test fails on it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from kvrouter.router.route.tokens.proxied_paths import PATHS
from kvrouter.router.serve.access.scope import Scope
from kvrouter.router.serve.api.openapi import EVENTS, HOT_OPERATIONS
from kvrouter.router.serve.page.page_files import FILES, PAGE

Scopes = frozenset[Scope]
# A method, and the path as its route has it.
Route = tuple[str, str]

# Load balancers ask these, and have no key.
OPEN_PATHS = frozenset({"/health", "/ready"})

PROXY, HITS, REGISTER, WATCH = (frozenset({scope}) for scope in (Scope.PROXY, Scope.HITS, Scope.REGISTER, Scope.WATCH))
ADMIN = frozenset({Scope.ADMIN})
ANY: Scopes = frozenset(Scope)

SCOPES: dict[Route, Scopes] = {
    **{("POST", operation[0]): HITS for operation in HOT_OPERATIONS},
    **{("POST", path): PROXY for path in PATHS},
    ("POST", "/reservations"): HITS,
    ("DELETE", "/reservations/{selection_id}"): HITS,
    ("POST", "/reservations/{selection_id}/prefill_complete"): HITS,
    ("POST", "/reservations/{selection_id}/output_block"): HITS,
    ("GET", "/v1/models"): PROXY | HITS | WATCH,
    ("GET", "/v1/models/{model}"): PROXY | HITS | WATCH,
    ("POST", "/register"): REGISTER,
    ("POST", "/unregister"): REGISTER,
    ("POST", "/workers"): REGISTER,
    ("PATCH", "/workers/{worker_id}"): REGISTER,
    ("DELETE", "/workers/{worker_id}"): REGISTER,
    # A client that drains a worker looks at what is in flight there; clients that choose by themselves look at all
    # loads.
    ("GET", "/workers"): REGISTER | WATCH,
    ("GET", "/workers/{worker_id}"): REGISTER | WATCH,
    ("GET", "/loads"): ANY,
    ("GET", EVENTS): WATCH,
    ("GET", "/decisions"): WATCH,
    ("GET", "/decisions/{name}"): WATCH,
    ("GET", "/diagnosis"): WATCH,
    ("GET", "/store"): WATCH,
    ("GET", "/metrics"): WATCH,
    ("GET", PAGE): ANY,
    ("GET", f"{FILES}{{name}}"): ANY,
    ("GET", "/version"): ANY,
    ("GET", "/openapi.json"): ANY,
    ("GET", "/docs"): ANY,
    **{("GET", path): ANY for path in OPEN_PATHS},
}


class RouteTable:
    """Finds the route of a request as the application of the cold paths will: by the same expressions, in their order.
    whole: paths that are their own route, whatever the method."""

    def __init__(self, routes: Iterable[BaseRoute], whole: Iterable[Route]) -> None:
        self._whole = {path: (method, path) for method, path in whole}
        self._routes: list[tuple[re.Pattern[str], Collection[str], str]] = [
            (route.path_regex, route.methods or (), route.path_format)
            for route in routes
            if isinstance(route, APIRoute)
        ]

    def scopes(self, method: str, path: str) -> Scopes:
        """Of which a key needs one. ANY where there is no such route: the answer says so, to whoever has a key."""
        route = self._route(method, path)
        return ANY if route is None else SCOPES.get(route, ADMIN)

    def _route(self, method: str, path: str) -> Route | None:
        whole = self._whole.get(path)
        if whole is not None:
            return whole
        for pattern, methods, template in self._routes:
            if method in methods and pattern.match(path):
                return method, template
        return None
