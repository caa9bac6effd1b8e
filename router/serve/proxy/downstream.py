# SPDX-License-Identifier: Apache-2.0
"""The client's side of a proxied request, as the proxy sees it.

`router/serve/api/http/proxied_answer.py` implements it on the client's connection.
"""

from __future__ import annotations

from typing import Protocol

from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.model.upstream.connection import AnswerHead
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.proxy.headers import Headers


class Source(Protocol):
    """The source of an answer's bytes."""

    def pause(self) -> None:
        """Stop reading from the source."""
        ...

    def resume(self) -> None:
        """Continue reading after `pause`."""
        ...


class ClientRequest(Protocol):
    """One request whose body is complete."""

    path: str
    # The path with the query, exactly as the client sent it.
    url: bytes
    headers: Headers
    # The models and salts that the client's key may name; None means any.
    bounds: KeyBounds | None
    body: bytes


class Client(ClientRequest, Protocol):
    """A client that sent a request and gets its answer.

    The task that serves it is cancelled when the client hangs up.
    """

    method: str

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that were sent but not yet accepted by the kernel, because the client does not read."""
        ...

    def begin(self, head: AnswerHead, headers: Headers, source: Source) -> None:
        """Begin an answer with these headers. `source` is paused while the client does not read."""

    def send(self, parts: list[bytes]) -> None:
        """Send the next bytes of the body. Never waits."""

    def finish(self) -> None:
        """End the body, which is complete."""

    def break_off(self) -> None:
        """End the answer early, so that the client sees that the body is incomplete."""

    def refuse(self, error: RouterError, headers: Headers) -> None:
        """Send the router's own error in place of an engine's answer."""
