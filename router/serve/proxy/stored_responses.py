# SPDX-License-Identifier: Apache-2.0
"""Requests about a stored response of `/v1/responses`: retrieve, cancel, delete, and its input items.

They go to the worker that made the response, with the client's query and headers. Nothing is computed for them, so they
take no place in the load.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import kvrouter.router.serve.proxy.headers as h
from kvrouter.router.base.common.errors import NoWorker, RouterError, UnknownResponse
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.observe.quality.answer_tap import AnswerTap
from kvrouter.router.observe.quality.request_watch import RequestWatch
from kvrouter.router.route.owners.response_owner import USABLE_ID
from kvrouter.router.route.owners.response_owners import ResponseOwners
from kvrouter.router.route.tokens.proxied_paths import stored_path
from kvrouter.router.serve.proxy.attempt import Attempt, error_of, named
from kvrouter.router.serve.proxy.downstream import Client, ClientRequest
from kvrouter.router.serve.proxy.request_reader import Request, caller_of
from kvrouter.router.serve.proxy.worker_addresses import Addresses

DELETE = "DELETE"
# The statuses with which an engine says that a response is deleted.
SUCCESSES = range(200, 300)


class MadeResponse:
    """A response while its answer passes. Its owner is remembered as soon as the id has passed."""

    def __init__(self, owners: ResponseOwners, worker: WorkerKey, caller: str) -> None:
        self._owners = owners
        self._worker = worker
        self._caller = caller
        self._id: str | None = None

    def named(self, response_id: str) -> None:
        """Remember the owner of the response."""
        self._id = response_id
        self._owners.made(response_id, self._worker, self._caller)

    def ended(self, watch: RequestWatch) -> None:
        """Remember the length of the conversation if the answer has reported it."""
        if self._id is None or (usage := watch.usage()) is None:
            return
        self._owners.counted(self._id, self._caller, usage.prompt_tokens + (usage.completion_tokens or 0))


class StoredResponses:
    """The stored responses of a proxy's workers."""

    def __init__(
        self,
        owners: ResponseOwners,
        sending: Attempt,
        addresses: Callable[[], Addresses],
        takers: Callable[[], list[WorkerKey]],
    ) -> None:
        """Take the parts of the proxy.

        Args:
            owners: The owners of the responses.
            sending: Sends requests to workers.
            addresses: Returns the addresses of the workers.
            takers: Returns the workers of all models that take requests. Raises NoWorker.
        """
        self.owners = owners
        self._sending = sending
        self._addresses = addresses
        self._takers = takers

    def follow(self, request: Request, worker: WorkerKey, tap: AnswerTap, status: int) -> MadeResponse | None:
        """Remember the response that passes the tap, or return None if the engine keeps none."""
        if not request.may_be_stored or status != HTTPStatus.OK:
            return None
        made = MadeResponse(self.owners, worker, caller_of(request.client))
        tap.name_response(made.named, self.owners.count_unread)
        return made

    async def worker_of(self, client: ClientRequest) -> WorkerKey:
        """Return the worker that keeps the response which a path names.

        Without API keys, a response that is not known is left to any engine, which says so.

        Raises:
            UnknownResponse: The client's key has no such response.
            OwnerGone: The response is gone with its worker.
            NoWorker: The response is not known, and no worker takes requests.
            StoreDown: The response is not known here, and Redis does not answer.
        """
        response_id, caller = _id_of(client), caller_of(client)
        owner = await self.owners.find(response_id, caller)
        if owner is not None:
            return owner.worker
        targets = self._addresses().targets
        if caller or USABLE_ID.fullmatch(response_id) is None:
            raise UnknownResponse(response_id)
        for worker in self._takers():
            if worker in targets:
                return worker
        raise NoWorker("no worker has an address to send it to: register the engine's HTTP address (url)")

    def error_of(self, failure: Failure, response_id: str, worker: WorkerKey) -> RouterError:
        """Return the error that the client gets if the owner of a response does not answer."""
        if failure.kind is Kind.REFUSED:
            return self.owners.gone(response_id, f"its worker {named(worker)} cannot be reached ({failure.text})")
        return error_of(failure)

    def answered(self, client: ClientRequest, method: str, status: int) -> None:
        """Forget the response if the engine has deleted it."""
        if method == DELETE and status in SUCCESSES:
            self.owners.forget(_id_of(client))

    async def forward(self, client: Client, request: Request) -> tuple[WorkerKey, int]:
        """Answer the client, and return the worker that answered with its status.

        Raises:
            RouterError: Nothing has been sent to the client.
            Failure: The answer broke off.
        """
        worker = await self.worker_of(client)
        target = self._addresses().targets.get(worker)
        if target is None:
            raise NoWorker(f"the worker {named(worker)} has no address that allow_hosts admits: register its url")
        request.method = client.method
        request.url = client.path.encode("ascii") + b"".join(client.url.partition(b"?")[1:])
        try:
            sent = await self._sending.send(request, worker, request.body, request.headers)
        except Failure as failure:
            raise self.error_of(failure, _id_of(client), worker) from None
        head = sent.head
        self.answered(client, client.method, head.status)
        try:
            headers = h.answer_headers(head.headers, [(h.WORKER, named(worker).encode())], request.request_id)
            client.begin(head, headers, sent.connection)
            await sent.connection.relay(client.send)
            client.finish()
        except Failure as failure:
            client.break_off()
            self._sending.break_off(worker, sent, failure)
            raise
        except BaseException:
            self._sending.give_up(sent)
            raise
        self._sending.give_back(sent)
        return worker, head.status


def _id_of(client: ClientRequest) -> str:
    stored = stored_path(client.path)
    assert stored is not None
    return stored[1]
