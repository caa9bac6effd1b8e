# SPDX-License-Identifier: Apache-2.0
"""The part of a replica's `Api` that the handlers of further paths share; each adds the methods that it needs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from kvrouter.simulator.engine.realtime import Engine

Body = TypeVar("Body", bound=msgspec.Struct)


class ReplicaLife(Protocol):
    """The part of a life of the replica that these handlers share."""

    @property
    def engine(self) -> Engine:
        """The engine of this life."""
        ...


class ReplicaApi(Protocol):
    """The part of `Api` that these handlers share."""

    model: str
    clock: Callable[[], float]

    @property
    def life(self) -> ReplicaLife:
        """Present life of the replica."""
        ...

    async def read(self, request: web.Request, kind: type[Body]) -> Body:
        """Return the decoded body. Raises Refused."""
        ...

    def fail_once(self) -> None:
        """Raise Refused while the replica is set to fail."""
        ...
