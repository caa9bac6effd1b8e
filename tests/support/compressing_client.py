# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of OpenAI's or Anthropic's client, which compresses each body that it sends."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import httpx2

from tests.support.compression import COMPRESS


class _Compressing:
    """A transport that compresses bodies; httpx and httpx2 both take it, so it derives from neither."""

    def __init__(self, coding: str, library: Any) -> None:
        self._coding = coding
        self._library = library
        self._inner = library.HTTPTransport()

    def __enter__(self) -> _Compressing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_request(self, request: Any) -> Any:
        if raw := request.read():
            headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
            headers.append((b"content-encoding", self._coding.encode()))
            content = COMPRESS[self._coding](raw)
            request = self._library.Request(
                request.method, request.url, headers=headers, content=content, extensions=request.extensions
            )
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def compressing(coding: str, library: ModuleType = httpx2) -> Any:
    """Return a client that sends every body in this coding.

    Args:
        coding: The content coding.
        library: httpx2, which OpenAI's client takes, or httpx.
    """
    client: Any = library.Client
    return client(transport=_Compressing(coding, library))


def library_of(client_class: type) -> ModuleType:
    """Return httpx or httpx2, from whose client this class derives."""
    names = {base.__module__.partition(".")[0] for base in client_class.__mro__}
    return sys.modules["httpx2" if "httpx2" in names else "httpx"]
