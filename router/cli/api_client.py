# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP API as the command line uses it: one blocking call, errors as one line."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvrouter.router.common.errors import SettingError
from kvrouter.router.config.loading import KUBERNETES_PORT

# Longer than any answer takes; shorter than a user's patience.
TIMEOUT_S = 30.0

DEFAULT_URL = "http://127.0.0.1:30000"
PORT_VARIABLE = "KVROUTER_PORT"
MAX_PORT = 65_535


def router_url(given: str | None, environ: Mapping[str, str]) -> str:
    """The router's address: the given one, with or without `http://`; else this machine's at the port that the
    environment gives `kvrouter serve`. Raises SettingError."""
    if given:
        return _checked(given if "://" in given else f"http://{given}", given)
    port = environ.get(PORT_VARIABLE, "")
    if not port or KUBERNETES_PORT.match(port):
        return DEFAULT_URL
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT):
        raise SettingError(f"{PORT_VARIABLE} is {port!r}: write the router's port, 1 to {MAX_PORT}, or pass --url")
    return f"http://127.0.0.1:{port}"


def _checked(url: str, given: str) -> str:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise SettingError(
            f"{given!r} is no address of a router: write --url (or KVROUTER_URL) like localhost:30000 or {DEFAULT_URL}"
        )
    return url.rstrip("/")


class ClientError(Exception):
    """The router cannot be reached, or refuses: one line with the cause and the fix."""


class Client:
    """A client of the router at `url`, as `router_url` gives it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer. Raises ClientError."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = urllib.request.Request(self.url + path, data, self._headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            raise ClientError(_message_of(error)) from None
        except msgspec.DecodeError:
            raise ClientError(f"what listens on {self.url} is no router: its answer is no JSON; check --url") from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            text = f"no router answers on {self.url} ({reason}); start `kvrouter serve`, or pass --url"
            raise ClientError(text) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClientError(f"what listens on {self.url} is no router ({error}); check --url") from None


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        body = msgspec.json.decode(error.read())
        message = str(body["error"]["message"])
        if body["error"]["code"] == "invalid_api_key":
            message += " (pass --api-key, or set KVROUTER_API_KEY)"
        return message
    except (msgspec.DecodeError, KeyError, TypeError, OSError):
        return f"what listens there is no router: it answers {error.code}; check --url"
