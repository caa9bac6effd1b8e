# SPDX-License-Identifier: Apache-2.0
"""The interfaces that the HTTP API needs. The API depends on these protocols and never on `router_core.py`.

All of it runs in one asyncio loop; `CorePort.ask` is synchronous and does no I/O. Errors are those of
`router/base/common/errors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from kvrouter.contract.hand_overs import HandOverPart
from kvrouter.contract.worker_status import TokensStatus, WorkerStatus
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import HitTable
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.prompt_tokens import Prompt


class CorePort(Protocol):
    """The core as the API sees it. `Core` of `router/app/core/router_core.py` implements it."""

    async def change(
        self, worker: WorkerKey, change: Callable[[Registration | None], Registration | None]
    ) -> Registration | None:
        """Register a worker as its newest registration requires, and return that registration.

        Args:
            worker: The worker.
            change: Takes the newest registration, or None; returns the one to register, or None to change nothing. An
                identical registration changes nothing either.
        """

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drop the matching workers, and return how many there were."""
        ...

    def registrations(self) -> Sequence[Registration]:
        """Return the registrations unchanged."""
        ...

    def is_draining(self, worker: WorkerKey) -> bool:
        """Return whether an operator drains the worker; False also for an unknown worker."""
        ...

    def given_id(self, worker: WorkerKey) -> str | int:
        """Return the worker's id with its registered type: a number if it was one."""
        ...

    def statuses(self, worker_id: str | None = None) -> Iterable[WorkerStatus]:
        """Return the statuses of all workers, or of all ranks and models of one id.

        Each status is made when it is read; workers may come and go in the meantime.
        """
        ...

    def ask(self, question: Question) -> Sequence[Hit]:
        """Return one hit for each worker of the model. Raises UnknownModel, UnknownWorker and BadQuestion."""
        ...

    def hit_table(self, question: Question) -> HitTable | None:
        """Return the hits as numbers, for a question that leaves no worker out and wants no explanation.

        Return None if only `ask` can answer.
        """
        ...

    async def hash_ahead(self, question: Question) -> None:
        """Hash a long prompt in turns, so that other requests are answered in the meantime.

        Call it before `ask` or `hit_table`. Raises UnknownModel.
        """

    def models(self) -> Sequence[str]:
        """Return the names of all registered models."""
        ...

    def resolve(self, name: str) -> ServedModel:
        """Return the model that a request's `model` means: a model, an alias, or an adapter. Raises UnknownModel."""
        ...

    def names(self) -> Sequence[str]:
        """Return all valid values of a request's `model`: models, their adapters, and aliases of both."""
        ...

    def request_ranks(self) -> Mapping[WorkerKey, int]:
        """Return the rank to send with a request, for each worker that needs one."""
        ...

    def handover(self, worker: WorkerKey) -> HandoverWay:
        """Return how the worker is handed a prompt that another one has computed."""
        ...

    def hash_block_size(self, model: str) -> int:
        """Return the number of tokens that one block hash covers. Raises UnknownModel."""
        ...

    def readiness(self) -> str | None:
        """Return why no worker can be chosen, or None if one can."""
        ...

    def cautions(self) -> Sequence[str]:
        """Return the risks of a configuration that works now."""
        ...

    def health(self) -> Sequence[str]:
        """Return why the process is degraded; empty if it is not."""
        ...


class HandOverPort(Protocol):
    """The hand-overs of the fleet, as the API sees them. `HandOvers` of `router/app/core/hand_overs.py` implements it."""

    async def begin(
        self,
        worker_id: str,
        dp_rank: int | None,
        model: str | None,
        to: Collection[str] | None,
        max_bytes: int,
        within_s: float,
    ) -> tuple[int, Sequence[HandOverPart]]:
        """Have workers take over from another, and return number and parts. Raises UnknownWorker and Conflict."""
        ...

    async def progress(self, number: int) -> Sequence[HandOverPart]:
        """Return the parts of a hand-over; none if no engine knows it."""
        ...

    async def stop(self, number: int) -> Sequence[HandOverPart]:
        """End a hand-over, and return its parts; none if no engine knows it."""
        ...


class TokensPort(Protocol):
    """The source of a text's tokens, as the API sees it. `TextTokenizer` implements it."""

    async def prompt(
        self,
        path: str,
        model: str,
        body: ClientBody,
        *,
        authorization: str | None = None,
        counts: bool = True,
        space: str = "",
    ) -> Prompt:
        """Return the tokens of a body that was sent to `path`. Raises BadQuestion if its prompt cannot be read.

        `counts` says whether this is a request, not a dry run; `space` is as in `TextTokenizer.prompt`.
        """
        ...

    def status(self, model: str, url: str | None) -> TokensStatus:
        """Return how the texts for this model's worker at `url` are tokenized."""
        ...

    def health(self) -> Sequence[str]:
        """Return why prompts have no tokens, or tokens not known to be the engine's own; empty if nothing is wrong."""
        ...


class SourcesPort(Protocol):
    """The sources of workers, as the API sees them. `Discovery` implements it."""

    async def complete(self, registration: Registration, *, any_rank: bool) -> Sequence[Registration]:
        """Return the workers that a registration stands for, completed with their engine's answers."""
        ...

    def statuses(self) -> Sequence[WorkerStatus]:
        """Return the workers that are known but cannot be registered yet."""
        ...

    def health(self) -> Sequence[str]:
        """Return the problems of the sources; empty if there are none."""
        ...
