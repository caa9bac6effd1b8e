# SPDX-License-Identifier: Apache-2.0
"""The clients' use of the HTTP library: its options, and the translation of its errors."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvrouter.client.calls import Call
from kvrouter.client.errors import AnswerLate, AnswerLost, AnswerUnreadable, RouterError, RouterUnreachable

try:
    # Imported by this name, so that the clients can import it from here.
    import httpx2 as httpx2
except ImportError as missing:
    # The extra `client` in pyproject.toml has the same requirement.
    raise ImportError("kvrouter.client needs httpx2: pip install 'httpx2>=2,<3'") from missing

DEFAULT_URL = "http://127.0.0.1:30000"
# A router accepts 4,096 connections from all its clients; calls beyond this number wait for one.
MAX_CONNECTIONS = 256
# An idle connection is closed before the router (75 s) or a proxy in front of it (usually 60 s) closes it, which would
# break a call.
KEEP_IDLE_S = 30.0


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits of a call.

    The router itself waits for nothing longer than its `tokenize_timeout_s` (1 s), and some seconds for an engine that
    is registered by its URL alone.
    """

    # Until there is a connection, TLS included.
    connect_s: float = 2.0
    # The longest silence before and within an answer.
    answer_s: float = 10.0


def options(url: str, api_key: str | None, timeouts: Timeouts, tls: ssl.SSLContext | None) -> dict[str, Any]:
    """Return arguments for the library's clients. Raises ValueError for a URL or key that cannot be a router's."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no router's URL; write one like {DEFAULT_URL} or https://gateway/kvrouter")
    headers = {"accept": "application/json", "content-type": "application/json"}
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()) or " " in api_key or not api_key:
            raise ValueError("an API key is printable ASCII without spaces")
        headers["authorization"] = f"Bearer {api_key}"
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx2.Timeout(timeouts.answer_s, connect=timeouts.connect_s),
        "limits": httpx2.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEP_IDLE_S,
        ),
        "verify": True if tls is None else tls,
        # Prompts go only where the URL says: through no proxy, and with no login, from the environment.
        "trust_env": False,
    }


def failure(error: httpx2.RequestError, call: Call[Any]) -> RouterError:
    """Return the library's error as one of ours."""
    problem = f"{call.method} {call.path}: {str(error) or type(error).__name__}"
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)):
        return RouterUnreachable(f"{problem}; is a router listening there?")
    if isinstance(error, httpx2.TimeoutException):
        return AnswerLate(f"{problem}; the router did not answer in time")
    if isinstance(error, httpx2.DecodingError):
        return AnswerUnreadable(problem)
    return AnswerLost(f"{problem}; the connection broke before the answer")
