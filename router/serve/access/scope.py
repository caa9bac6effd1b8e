# SPDX-License-Identifier: Apache-2.0
"""The scopes of API keys. `router/serve/api/scopes.py` lists the scopes that each route accepts."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """The part of the API that a key opens."""

    # Both PROXY and HITS.
    ASK = "ask"
    # Proxied requests, and models.
    PROXY = "proxy"
    # Requests whose answers show predicted hits (questions, choices, reservations), and queries for the models.
    HITS = "hits"
    # Registering, changing, draining and removing workers.
    REGISTER = "register"
    # Everything that can be read about the fleet and the router, metrics included.
    WATCH = "watch"
    # Everything.
    ADMIN = "admin"


# The scopes that `ask` includes.
ASK_PARTS = frozenset({Scope.PROXY, Scope.HITS})
