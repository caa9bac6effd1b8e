# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of OpenAI's client, which compresses each body that it sends."""

from __future__ import annotations

import httpx2

from tests.support.compression import COMPRESS


class _Compressing(httpx2.BaseTransport):
    """A transport that compresses bodies."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inner = httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if raw := request.read():
            headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
            headers.append((b"content-encoding", self._coding.encode()))
            content = COMPRESS[self._coding](raw)
            request = httpx2.Request(
                request.method, request.url, headers=headers, content=content, extensions=request.extensions
            )
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def compressing(coding: str) -> httpx2.Client:
    """Return a client that sends every body in this coding."""
    return httpx2.Client(transport=_Compressing(coding))
