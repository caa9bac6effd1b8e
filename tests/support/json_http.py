# SPDX-License-Identifier: Apache-2.0
"""Plain HTTP requests with JSON bodies, for servers of a test."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=10
    ) as reply:
        return json.loads(reply.read() or b"null")


def refusal(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(url, body)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]
