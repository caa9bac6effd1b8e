# SPDX-License-Identifier: Apache-2.0
"""The client's side of a proxied request, as the proxy sees it; `router.api.http.proxied_answer` has it on the
client's connection."""

from __future__ import annotations

from typing import Protocol

from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.model.upstream.connection import AnswerHead
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.proxy.headers import Headers


class Source(Protocol):
    """Where the bytes of an answer come from."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class ClientRequest(Protocol):
    """One request whose body is whole."""

    path: str
    # As it came, with the query.
    url: bytes
    headers: Headers
    # The models and salts that its key may name; None: any.
    bounds: KeyBounds | None
    body: bytes


class Client(ClientRequest, Protocol):
    """Who sent it, and gets the answer. Its task is cancelled when the client hangs up."""

    @property
    def unread_bytes(self) -> int:
        """What was sent and is not taken by the kernel yet: the client does not read."""
        ...

    def begin(self, head: AnswerHead, headers: Headers, source: Source) -> None:
        """An answer with these headers follows. `source` is paused while the client does not read."""

    def send(self, parts: list[bytes]) -> None:
        """The next bytes of its body. Never waits."""

    def finish(self) -> None:
        """The body is whole."""

    def break_off(self) -> None:
        """The body stays short, and the client sees that it does."""

    def refuse(self, error: RouterError, headers: Headers) -> None:
        """The router's own answer, in place of one of an engine."""
