# SPDX-License-Identifier: Apache-2.0
"""The routes that register, change, drop and list workers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.convertors import Convertor, register_url_convertor

from kvrouter.contract.registrations import (
    ChangedReply,
    DescribedReply,
    RegisterBody,
    RegisteredReply,
    UnregisterBody,
    WorkerPatch,
)
from kvrouter.contract.worker_status import WorkersReply, WorkerStatus
from kvrouter.router.base.common.errors import Conflict, UnknownWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import BASE_PATH_LEFT_OUT, UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.registration_from_body import (
    dp_rank_of,
    model_of,
    patched,
    registration_of,
    worker_id_of,
)
from kvrouter.router.model.workers.source_precedence import PLACES, REGISTER
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK
from kvrouter.router.serve.api.dynamo_shapes import (
    INCOMPLETE,
    ROUTING_GROUP,
    SCHEDULABLE,
    UNSCHEDULABLE,
    patch_in,
    registrations_in,
)
from kvrouter.router.serve.api.openapi import gives, takes
from kvrouter.router.serve.api.ports import CorePort, SourcesPort, TokensPort
from kvrouter.router.serve.api.requests import (
    BodyReader,
)
from kvrouter.router.serve.api.responses import encode
from kvrouter.router.serve.proxy.proxy import Proxy


class _Name(Convertor[str]):
    """A name in a path with any characters. A name is needed because starlette's `path` ends at a line break."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """Return the name unchanged."""
        return value

    def to_string(self, value: str) -> str:
        """Return the name unchanged."""
        return value


register_url_convertor("name", _Name())

# A row takes about 40 us, in which nothing else is answered; after this many rows, other requests get a turn.
ROWS_A_TURN = 64

DpRank = Annotated[int | None, Query(ge=0, le=MAX_DP_RANK, description="only this rank; without it, all")]
Model = Annotated[str | None, Query(description="only of this model")]


def respond(request: Request, reply: Any) -> Response:
    """Return the reply in the encoding that the client accepts."""
    content, media_type = encode(reply, request.headers.get("accept", ""))
    return Response(content, media_type=media_type)


def worker_routes(
    core: CorePort, tokens: TokensPort | None, proxy: Proxy | None, sources: SourcesPort | None
) -> APIRouter:
    """Return the routes, bound to the core.

    Args:
        core: Registers workers and lists them.
        tokens: Reports how texts are tokenized; None omits that.
        proxy: Reports why a worker takes no new requests; None omits that.
        sources: Completes registrations with the engines' reports about themselves; None takes registrations unchanged.
    """
    router = APIRouter(tags=["workers"])
    register_reader = BodyReader(RegisterBody)
    unregister_reader = BodyReader(UnregisterBody)
    patch_reader = BodyReader(WorkerPatch)

    async def read(request: Request, reader: BodyReader) -> Any:
        return reader.read(await request.body(), request.headers.get("content-type", ""))

    def named(worker_id: str, dp_rank: int | None, model: str | None) -> list[Registration]:
        """Return the registrations of a worker id, limited to a rank and a model if these are not None."""
        return [
            registration
            for registration in core.registrations()
            if registration.worker.worker_id == worker_id
            and dp_rank in (None, registration.worker.dp_rank)
            and model in (None, registration.worker.model)
        ]

    def unknown(worker_id: str, dp_rank: int | None, model: str | None) -> UnknownWorker:
        """Return the error for a worker that is not registered. It names the source, if one lists the worker."""
        for status in () if sources is None else sources.statuses():
            if status.worker_id == worker_id:
                place = PLACES.get(status.source, status.source)
                return UnknownWorker(f"worker {worker_id!r} is not registered yet: change it in {place}")
        rank = "" if dp_rank is None else f" rank {dp_rank}"
        of_model = "" if model is None else f" of model {model!r}"
        return UnknownWorker(
            f"no worker {worker_id!r}{rank}{of_model} is registered; GET /workers lists those that are"
        )

    async def drop(
        worker_id: str, dp_rank: int | None, model: str | None
    ) -> tuple[Registration | None, RegisteredReply]:
        """Drop the matching workers. Return the first one's registration if it is known, and the reply."""
        registrations = named(worker_id, dp_rank, model)
        dropped = await core.unregister(worker_id, dp_rank, model)
        if not dropped:
            raise unknown(worker_id, dp_rank, model)
        given_id = registrations[0].given_id if registrations else worker_id
        return registrations[0] if registrations else None, RegisteredReply(
            status="ok", worker_id=given_id, dropped=dropped
        )

    async def add(request: Request) -> tuple[Registration, bool]:
        """Register the workers of a body. Return the first with its note, and whether it differs from the body."""
        registrations: list[Registration] = []
        learned, note = False, ""
        for body in registrations_in(await read(request, register_reader)):
            if sources is None:
                registrations.append(registration_of(body))
            else:
                # Without a model in the body, the engine is queried for it.
                requested = registration_of(body, UNKNOWN_MODEL if body.url is not None else None)
                completed = await sources.complete(requested, any_rank=body.dp_rank is None)
                learned |= completed != [requested]
                registrations += completed
            if body.url != registrations[-1].url:
                learned, note = True, BASE_PATH_LEFT_OUT
        for registration in registrations:
            await core.change(registration.worker, partial(_keep_draining, registration))
        return msgspec.structs.replace(registrations[0], note=registrations[0].note or note), learned

    async def register(request: Request) -> Response:
        """Register a worker. The same registration again changes nothing.

        A different one for the same id and rank replaces it. If the body has a url but no model or event endpoints, the
        engine is queried for them, and the answer says what was learned.
        """
        registration, learned = await add(request)
        if learned:
            return respond(request, _described(registration))
        return respond(request, RegisteredReply(status="ok", worker_id=registration.given_id))

    async def add_worker(request: Request) -> Response:
        """Register a worker like /register, with Dynamo's form of answer; data_parallel_size registers each rank."""
        return respond(request, _described((await add(request))[0]))

    for path, name, handler, reply in (
        ("/register", "register", register, RegisteredReply),
        ("/workers", "add_worker", add_worker, DescribedReply),
    ):
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            summary="Register a worker",
            operation_id=name,
            openapi_extra=takes(RegisterBody),
            responses=gives(reply, 400, 403, 409, 413, 429, 502, 503),
        )

    @router.post(
        "/unregister",
        summary="Drop a worker and its residency",
        operation_id="unregister",
        openapi_extra=takes(UnregisterBody),
        responses=gives(RegisteredReply, 400, 404, 409, 413, 429, 503),
    )
    async def unregister(request: Request) -> Response:
        body: UnregisterBody = await read(request, unregister_reader)
        return respond(request, (await drop(worker_id_of(body), dp_rank_of(body.dp_rank), model_of(body)))[1])

    async def rows(worker_id: str | None = None) -> list[WorkerStatus]:
        """Return the statuses of all workers, or of one id, with what the other parts know of each."""
        statuses: list[WorkerStatus] = []
        for status in core.statuses(worker_id):
            if len(statuses) % ROWS_A_TURN == ROWS_A_TURN - 1:
                await asyncio.sleep(0)
            worker = WorkerKey(status.model, status.worker_id, status.dp_rank)
            tokens_status = None if tokens is None else tokens.status(status.model, status.url)
            closed = "" if proxy is None else proxy.closed(worker) or ""
            predictions = "" if proxy is None else proxy.predictions_problem(worker) or ""
            reuse = None if proxy is None else proxy.reuse(worker)
            statuses.append(
                msgspec.structs.replace(
                    status, tokens=tokens_status, closed=closed, predictions=predictions, reuse=reuse
                )
            )
        waiting = () if sources is None else sources.statuses()
        return statuses + [status for status in waiting if worker_id in (None, status.worker_id)]

    @router.get("/workers", summary="All workers", operation_id="workers", responses=gives(WorkersReply))
    async def workers(request: Request) -> Response:
        return respond(request, WorkersReply(await rows()))

    @router.get(
        "/workers/{worker_id:name}",
        summary="One worker: all its ranks and models",
        operation_id="worker",
        responses=gives(WorkersReply, 400, 404),
    )
    async def worker(request: Request, worker_id: str, dp_rank: DpRank = None, model: Model = None) -> Response:
        """List the same entries as for all workers. dp_rank and model select among them."""
        statuses = [
            status
            for status in await rows(worker_id)
            if dp_rank in (None, status.dp_rank) and model in (None, status.model)
        ]
        if not statuses:
            raise unknown(worker_id, dp_rank, model)
        return respond(request, WorkersReply(statuses))

    @router.patch(
        "/workers/{worker_id:name}",
        summary="Change a worker",
        operation_id="change_worker",
        openapi_extra=takes(WorkerPatch),
        responses=gives(ChangedReply, 400, 403, 404, 409, 413, 429, 503),
    )
    async def patch(request: Request, worker_id: str) -> Response:
        """Change a worker. Absent fields stay; null unsets. Without dp_rank all ranks change."""
        body = patch_in(await read(request, patch_reader))
        model, dp_rank = model_of(body), dp_rank_of(body.dp_rank)
        registrations = named(worker_id, dp_rank, model)
        if not registrations:
            raise unknown(worker_id, dp_rank, model)
        if len(registrations) > 1 and not (body.endpoint is msgspec.UNSET and body.replay_endpoint is msgspec.UNSET):
            # Each rank has its own stream: one endpoint for all would count its blocks for each rank.
            raise Conflict(
                f"worker {worker_id!r} has {len(registrations)} ranks or models; select one by dp_rank and model"
            )

        def change(former: Registration | None) -> Registration | None:
            if former is None:
                return None
            changed = patched(former, body)
            if former.source != REGISTER and msgspec.structs.replace(former, draining=changed.draining) != changed:
                place = PLACES.get(former.source, former.source)
                raise Conflict(
                    f"worker {worker_id!r} is kept by {place}: change it there; only its state can be patched here",
                    code="kept_by_source",
                )
            if body.state == "active" and changed.retiring:
                raise Conflict(
                    f"worker {worker_id!r} is drained by {PLACES.get(former.source, former.source)}: change it there",
                    code="kept_by_source",
                )
            return changed

        # Either all ranks can be changed, or none is.
        for registration in registrations:
            change(registration)
        changes = [await core.change(registration.worker, change) for registration in registrations]
        changed = changes[0]
        if changed is None:
            # Another request removed the worker in the meantime.
            raise unknown(worker_id, dp_rank, model)
        note = "" if body.url in (msgspec.UNSET, changed.url) else BASE_PATH_LEFT_OUT
        of_changed = changed.worker.dp_rank, changed.worker.model
        described = _described(msgspec.structs.replace(changed, note=changed.note or note))
        status = next((row for row in core.statuses(worker_id) if (row.dp_rank, row.model) == of_changed), None)
        if status is None:
            raise unknown(worker_id, dp_rank, model)
        return respond(
            request,
            ChangedReply(
                **msgspec.structs.asdict(described),
                state=status.state,
                draining=status.draining,
                draining_s=status.draining_s,
            ),
        )

    @router.delete(
        "/workers/{worker_id:name}",
        summary="Drop a worker and its residency",
        operation_id="drop_worker",
        responses=gives(RegisteredReply, 400, 404, 409, 429, 503),
    )
    async def delete(request: Request, worker_id: str, dp_rank: DpRank = None, model: Model = None) -> Response:
        registration, reply = await drop(worker_id, dp_rank, model)
        if registration is None:
            return respond(request, reply)
        return respond(request, _described(registration, dropped=reply.dropped))

    return router


def _keep_draining(registration: Registration, newest: Registration | None) -> Registration:
    """Return the registration of an engine, which may register repeatedly and must not undo an operator's PATCH."""
    return msgspec.structs.replace(registration, draining=newest is not None and newest.draining)


def _described(registration: Registration, dropped: int | None = None) -> DescribedReply:
    """Return the answer with the fields that Dynamo's clients read."""
    lifecycle = INCOMPLETE if registration.url is None or registration.draining else SCHEDULABLE
    return DescribedReply(
        status="ok",
        worker_id=registration.given_id,
        dropped=dropped,
        model_name=registration.worker.model,
        routing_group=ROUTING_GROUP,
        lifecycle=lifecycle if dropped is None else UNSCHEDULABLE,
        endpoint=registration.url,
        kv_events_endpoint=registration.events,
        replay_endpoint=registration.replay,
        block_size=registration.block_size,
        note=registration.note or None,
    )
