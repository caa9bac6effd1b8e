# SPDX-License-Identifier: Apache-2.0
"""What an API key may be for. `router/api/scopes.py` says which route takes which."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """ask: both of the next two. proxy: proxied requests, models. hits: whatever answers with predicted hits: questions,
    choices, reservations; models. register: workers come, change, drain and go.
    watch: whatever can be read of fleet and router, metrics included. admin: everything."""

    ASK = "ask"
    PROXY = "proxy"
    HITS = "hits"
    REGISTER = "register"
    WATCH = "watch"
    ADMIN = "admin"


# What a key with `ask` has.
ASK_PARTS = frozenset({Scope.PROXY, Scope.HITS})
