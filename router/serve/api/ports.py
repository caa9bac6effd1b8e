# SPDX-License-Identifier: Apache-2.0
"""What the HTTP API needs from the core. The API depends on these protocols and never on `router_core`.

All of it runs in one asyncio loop; `ask` is synchronous and does no I/O. Errors are those of
`router.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import HitTable
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay
from kvrouter.router.model.workers.worker_status import TokensStatus, WorkerStatus
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.prompt_tokens import Prompt


class CorePort(Protocol):
    """The core as the API sees it; `router.core.Core` satisfies it."""

    async def register(self, registration: Registration) -> None:
        """The same again is a no-op; a different one for the same id and rank replaces it."""

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drops the workers that match; returns how many there were."""
        ...

    def registrations(self) -> Sequence[Registration]:
        """The registrations as given; `PATCH /workers/{id}` changes one of these."""
        ...

    def is_draining(self, worker: WorkerKey) -> bool:
        """Whether an operator has it drained; False also for a worker that is not known."""
        ...

    def given_id(self, worker: WorkerKey) -> str | int:
        """The worker's id as registered, a number if it was one."""
        ...

    def statuses(self, worker_id: str | None = None) -> Iterable[WorkerStatus]:
        """Of all workers, or of all ranks and models of one id. Each is made when it is read; workers may come and go
        meanwhile."""
        ...

    def ask(self, question: Question) -> Sequence[Hit]:
        """One hit for each worker of the model. Raises UnknownModel, UnknownWorker, BadQuestion."""
        ...

    def hit_table(self, question: Question) -> HitTable | None:
        """The same as numbers, for a question that leaves no worker out and wants no explanation; None where it takes
        `ask` to answer."""
        ...

    async def hash_ahead(self, question: Question) -> None:
        """Before `ask` or `hit_table`: hashes a long prompt in turns, so that others are answered meanwhile. Raises
        UnknownModel."""

    def models(self) -> Sequence[str]: ...

    def resolve(self, name: str) -> ServedModel:
        """What a request's `model` means: a model, another name of one, or an adapter. Raises UnknownModel."""
        ...

    def names(self) -> Sequence[str]:
        """All that a request's `model` may be: models, their adapters, and other names of both."""
        ...

    def handover(self, worker: WorkerKey) -> HandoverWay:
        """How a worker is handed a prompt that another one has computed."""
        ...

    def hash_block_size(self, model: str) -> int:
        """Tokens that one block hash covers. Raises UnknownModel."""
        ...

    def readiness(self) -> str | None:
        """None when a worker can be chosen, else the reason why not."""
        ...

    def cautions(self) -> Sequence[str]:
        """Risks of a configuration that works now."""
        ...

    def health(self) -> Sequence[str]:
        """Why the process is degraded; empty when it is not."""
        ...


class TokensPort(Protocol):
    """Tokens from text as the API sees them; `router.tokens.tokenizer.Tokenizing` satisfies it."""

    async def prompt(
        self, path: str, model: str, body: ClientBody, *, authorization: str | None = None, counts: bool = True
    ) -> Prompt:
        """Return the tokens of a body that was sent to `path`. counts: whether it is a request, not a dry run. Raises
        BadQuestion where its prompt cannot be read."""
        ...

    def status(self, model: str, url: str | None) -> TokensStatus: ...

    def health(self) -> Sequence[str]:
        """Which tokens differ from the engines'; empty if none do."""
        ...


class SourcesPort(Protocol):
    """Where workers come from, as the API sees it; `router.discovery.discovery.Discovery` satisfies it."""

    async def complete(self, registration: Registration, *, any_rank: bool) -> Sequence[Registration]:
        """The workers that a registration stands for, completed by their engine's answers."""
        ...

    def statuses(self) -> Sequence[WorkerStatus]:
        """Workers that are known and cannot be registered yet."""
        ...

    def health(self) -> Sequence[str]:
        """Problems of the sources; empty if there are none."""
        ...
