# SPDX-License-Identifier: Apache-2.0
"""What the HTTP API needs of the core. The API depends on these Protocols and never on `router.core`.

All of it runs in one asyncio loop; `ask` and `choose` are synchronous and do no I/O. Errors are those of
`router.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvrouter.router.question import Hit, Question
from kvrouter.router.registration import Registration


class Status(Protocol):
    """One row of `GET /workers`; shapes as in api.md."""

    @property
    def worker_id(self) -> str: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def url(self) -> str | None: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def epoch(self) -> str | None: ...
    @property
    def seq(self) -> int | None: ...
    @property
    def catalog(self) -> dict[str, Any] | None: ...
    @property
    def catalog_source(self) -> str | None: ...
    @property
    def hash_scheme(self) -> str: ...
    @property
    def residency(self) -> dict[str, int]: ...
    @property
    def lag_ms(self) -> float | None: ...
    @property
    def gaps(self) -> int: ...
    @property
    def last_event_age_s(self) -> float | None: ...


class Candidate(Protocol):
    """One worker as it stood in a choice; `cost` and `load` in tokens, lower cost wins."""

    @property
    def hit(self) -> Hit: ...
    @property
    def cost(self) -> int: ...
    @property
    def load(self) -> int: ...


class Choice(Protocol):
    """The chosen worker and why; `candidates` are all that were looked at, the chosen one among them."""

    @property
    def hit(self) -> Hit: ...
    @property
    def url(self) -> str | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def candidates(self) -> Sequence[Candidate]: ...


class CorePort(Protocol):
    """The core as the API sees it; `router.core.Core` satisfies it."""

    async def register(self, registration: Registration) -> None:
        """The same again is a no-op; a different one for the same id and rank replaces it."""

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drops the workers that match; returns how many there were."""
        ...

    def registrations(self) -> Sequence[Registration]:
        """What is registered now, as it was given; `PATCH /workers/{id}` changes one of these."""
        ...

    def statuses(self) -> Sequence[Status]: ...

    def ask(self, question: Question) -> Sequence[Hit]:
        """One hit for each worker of the model. Raises UnknownModel, UnknownWorker, BadQuestion."""
        ...

    def choose(self, question: Question) -> Choice:
        """Raises what `ask` raises, and NoWorker."""
        ...

    def models(self) -> Sequence[str]: ...

    def hash_block_size(self, model: str) -> int:
        """Tokens that one block hash covers. Raises UnknownModel."""
        ...

    def readiness(self) -> str | None:
        """None when a worker can be chosen, else the reason why not."""
        ...

    def health(self) -> Sequence[str]:
        """Why the process is degraded; empty when it is not."""
        ...
