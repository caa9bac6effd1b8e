# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP API as the command line uses it: one blocking call, errors as one line."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Any

import msgspec

# Longer than any answer takes; shorter than a user's patience.
TIMEOUT_S = 30.0


class ClientError(Exception):
    """The router cannot be reached, or refuses: one line with the cause and the fix. status: of what answered."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """A client of the router at `url`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ClientError(f"--url is {url!r}: write an HTTP address like http://127.0.0.1:30000")
        self._url = url.rstrip("/")
        # When the last answer was made, as the router dates it.
        self.date: str | None = None
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer. Raises ClientError."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = urllib.request.Request(self._url + path, data, self._headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                self.date = answer.headers.get("date")
                return msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            raise ClientError(_message_of(error), error.code) from None
        except msgspec.DecodeError:
            raise ClientError(f"what listens on {self._url} is no router: its answer is no JSON; check --url") from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            text = f"no router answers on {self._url} ({reason}); start `kvrouter serve`, or pass --url"
            raise ClientError(text) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClientError(f"what listens on {self._url} is no router ({error}); check --url") from None


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        body = msgspec.json.decode(error.read())
        message = str(body["error"]["message"])
        if body["error"]["code"] == "invalid_api_key":
            message += " (pass --api-key, or set KVROUTER_API_KEY)"
        return message
    except (msgspec.DecodeError, KeyError, TypeError, OSError):
        return f"what listens there is no router: it answers {error.code}; check --url"
