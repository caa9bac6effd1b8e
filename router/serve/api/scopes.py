# SPDX-License-Identifier: Apache-2.0
"""The scopes of an API key that each route accepts.

A route that is not listed here accepts `admin` alone, and a test fails on it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from kvrouter.router.route.tokens.proxied_paths import PATHS, STORED_PATHS, stored_path
from kvrouter.router.serve.access.scope import Scope
from kvrouter.router.serve.api.openapi import EVENTS, HOT_OPERATIONS
from kvrouter.router.serve.page.page_files import FILES, PAGE

Scopes = frozenset[Scope]
# A method, and the path template of the route.
Route = tuple[str, str]

# Load balancers request these paths, and have no key.
OPEN_PATHS = frozenset({"/health", "/ready"})

PROXY, HITS, REGISTER, WATCH = (frozenset({scope}) for scope in (Scope.PROXY, Scope.HITS, Scope.REGISTER, Scope.WATCH))
ADMIN = frozenset({Scope.ADMIN})
ANY: Scopes = frozenset(Scope)

SCOPES: dict[Route, Scopes] = {
    **{("POST", operation[0]): HITS for operation in HOT_OPERATIONS},
    **{("POST", path): PROXY for path in PATHS},
    **{(method, path): PROXY for path, methods in STORED_PATHS.items() for method in methods},
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
    ("POST", "/workers/{worker_id}/hand_over"): REGISTER,
    ("GET", "/hand_overs/{number}"): REGISTER | WATCH,
    ("DELETE", "/hand_overs/{number}"): REGISTER,
    # A client that drains a worker watches the requests in flight there; clients that choose workers themselves watch
    # all loads.
    ("GET", "/workers"): REGISTER | WATCH,
    ("GET", "/workers/{worker_id}"): REGISTER | WATCH,
    ("GET", "/loads"): ANY,
    ("GET", EVENTS): WATCH,
    ("GET", "/decisions"): WATCH,
    ("GET", "/decisions/{name}"): WATCH,
    ("GET", "/diagnosis"): WATCH,
    ("GET", "/diagnosis/{code}"): ANY,
    ("GET", "/settings"): WATCH,
    ("GET", "/store"): WATCH,
    ("GET", "/history"): WATCH,
    ("GET", "/savings"): WATCH,
    ("GET", "/metrics"): WATCH,
    ("GET", PAGE): ANY,
    ("GET", f"{FILES}{{name}}"): ANY,
    ("GET", "/version"): ANY,
    ("GET", "/openapi.json"): ANY,
    ("GET", "/docs"): ANY,
    **{("GET", path): ANY for path in OPEN_PATHS},
}


class RouteTable:
    """A lookup of the route that the application of the cold paths will choose.

    It uses the same expressions as the application, in the same order.
    """

    def __init__(self, routes: Iterable[BaseRoute], whole: Iterable[Route]) -> None:
        # Paths that are their own route, whatever the method.
        self._whole = {path: (method, path) for method, path in whole}
        self._routes: list[tuple[re.Pattern[str], Collection[str], str]] = [
            (route.path_regex, route.methods or (), route.path_format)
            for route in routes
            if isinstance(route, APIRoute)
        ]

    def scopes(self, method: str, path: str) -> Scopes:
        """Return the scopes of which a key needs one.

        Return `ANY` if there is no such route, so that every client with a key gets the answer that says so.
        """
        route = self._route(method, path)
        return ANY if route is None else SCOPES.get(route, ADMIN)

    def _route(self, method: str, path: str) -> Route | None:
        """Return the route of a request, or None if there is none."""
        whole = self._whole.get(path)
        if whole is not None:
            return whole
        stored = stored_path(path)
        if stored is not None:
            return (method, stored[0]) if method in STORED_PATHS[stored[0]] else None
        for pattern, methods, template in self._routes:
            if method in methods and pattern.match(path):
                return method, template
        return None
