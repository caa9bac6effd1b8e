# SPDX-License-Identifier: Apache-2.0
"""What an API key may be for. `router/api/scopes.py` says which route takes which."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """ask: questions, choices, reservations, models, proxied requests. register: workers come, change, drain and go.
    watch: whatever can be read of fleet and router, metrics included. admin: everything."""

    ASK = "ask"
    REGISTER = "register"
    WATCH = "watch"
    ADMIN = "admin"
