# SPDX-License-Identifier: Apache-2.0
"""Registering, changing, dropping and listing workers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.convertors import Convertor, register_url_convertor

from kvrouter.router.base.common.errors import Conflict, UnknownWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.registration_bodies import (
    RegisterBody,
    UnregisterBody,
    WorkerPatch,
    model_of,
)
from kvrouter.router.model.workers.registration_from_body import dp_rank_of, patched, registration_of, worker_id_of
from kvrouter.router.model.workers.source_precedence import PLACES, REGISTER
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK
from kvrouter.router.model.workers.worker_status import WorkerStatus
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
from kvrouter.router.serve.api.responses import RegisteredReply, WorkersReply, encode
from kvrouter.router.serve.proxy.proxy import Proxy


class _Name(Convertor[str]):
    """A name in a path with any characters: starlette's `path` ends at a line break."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _Name())

# A row takes some 40 us; meanwhile nothing else is answered.
ROWS_A_TURN = 64

DpRank = Annotated[int | None, Query(ge=0, le=MAX_DP_RANK, description="only this rank; without it, all")]
Model = Annotated[str | None, Query(description="only of this model")]


def respond(request: Request, reply: Any) -> Response:
    """The reply in the encoding that the client accepts."""
    content, media_type = encode(reply, request.headers.get("accept", ""))
    return Response(content, media_type=media_type)


def worker_routes(
    core: CorePort, tokens: TokensPort | None, proxy: Proxy | None, sources: SourcesPort | None
) -> APIRouter:
    """The routes, bound to `core`. `tokens` reports how texts are tokenized, `proxy` why a worker takes no new
    requests, `sources` what engines report about themselves."""
    router = APIRouter(tags=["workers"])
    register_reader = BodyReader(RegisterBody)
    unregister_reader = BodyReader(UnregisterBody)
    patch_reader = BodyReader(WorkerPatch)

    async def read(request: Request, reader: BodyReader) -> Any:
        return reader.read(await request.body(), request.headers.get("content-type", ""))

    def named(worker_id: str, dp_rank: int | None, model: str | None) -> list[Registration]:
        return [
            registration
            for registration in core.registrations()
            if registration.worker.worker_id == worker_id
            and dp_rank in (None, registration.worker.dp_rank)
            and model in (None, registration.worker.model)
        ]

    async def drop(
        worker_id: str, dp_rank: int | None, model: str | None
    ) -> tuple[Registration | None, RegisteredReply]:
        known = named(worker_id, dp_rank, model)
        dropped = await core.unregister(worker_id, dp_rank, model)
        if not dropped:
            raise UnknownWorker(missing(worker_id, dp_rank, model))
        given_id = known[0].given_id if known else worker_id
        return known[0] if known else None, RegisteredReply("ok", given_id, dropped)

    async def add(request: Request) -> tuple[Registration, bool]:
        """The first registration, and whether its engine added anything to the body."""
        registrations: list[Registration] = []
        learned = False
        for body in registrations_in(await read(request, register_reader)):
            if sources is None:
                registrations.append(registration_of(body))
            else:
                # Without a model, its engine says which.
                given = registration_of(body, UNKNOWN_MODEL if body.url is not None else None)
                completed = await sources.complete(given, any_rank=body.dp_rank is None)
                learned |= completed != [given]
                registrations += completed
        for registration in registrations:
            # Engines may register repeatedly and must not undo an operator's PATCH.
            draining = core.is_draining(registration.worker)
            await core.register(msgspec.structs.replace(registration, draining=draining))
        return registrations[0], learned

    async def register(request: Request) -> Response:
        """The same registration again changes nothing; a different one for the same id and rank replaces it. If the
        body has a url but no model or event endpoints, the engine is queried for them, and the answer says what was
        learned."""
        registration, learned = await add(request)
        return respond(request, _described(registration) if learned else RegisteredReply("ok", registration.given_id))

    async def add_worker(request: Request) -> Response:
        """Like /register, with Dynamo's form of answer; data_parallel_size registers each rank."""
        return respond(request, _described((await add(request))[0]))

    for path, name, handler in (("/register", "register", register), ("/workers", "add_worker", add_worker)):
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            summary="Register a worker",
            operation_id=name,
            openapi_extra=takes(RegisterBody),
            responses=gives(RegisteredReply, 400, 403, 409, 413, 429, 502, 503),
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
        shown: list[WorkerStatus] = []
        for status in core.statuses(worker_id):
            if len(shown) % ROWS_A_TURN == ROWS_A_TURN - 1:
                await asyncio.sleep(0)
            worker = WorkerKey(status.model, status.worker_id, status.dp_rank)
            found = None if tokens is None else tokens.status(status.model, status.url)
            closed = "" if proxy is None else proxy.closed(worker) or ""
            untrue = "" if proxy is None else proxy.predictions_problem(worker) or ""
            reuse = None if proxy is None else proxy.reuse(worker)
            shown.append(msgspec.structs.replace(status, tokens=found, closed=closed, predictions=untrue, reuse=reuse))
        waiting = () if sources is None else sources.statuses()
        return shown + [status for status in waiting if worker_id in (None, status.worker_id)]

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
        """The same entries as of all workers. dp_rank and model select among them."""
        found = [
            status
            for status in await rows(worker_id)
            if dp_rank in (None, status.dp_rank) and model in (None, status.model)
        ]
        if not found:
            raise UnknownWorker(missing(worker_id, dp_rank, model))
        return respond(request, WorkersReply(found))

    @router.patch(
        "/workers/{worker_id:name}",
        summary="Change a worker",
        operation_id="change_worker",
        openapi_extra=takes(WorkerPatch),
        responses=gives(RegisteredReply, 400, 403, 404, 409, 413, 429, 503),
    )
    async def patch(request: Request, worker_id: str) -> Response:
        """Absent fields stay; null unsets. Without dp_rank all ranks change."""
        body = patch_in(await read(request, patch_reader))
        model, dp_rank = model_of(body), dp_rank_of(body.dp_rank)
        known = named(worker_id, dp_rank, model)
        if not known:
            raise UnknownWorker(missing(worker_id, dp_rank, model))
        if len(known) > 1 and not (body.endpoint is msgspec.UNSET and body.replay_endpoint is msgspec.UNSET):
            # Each rank has its own stream: one endpoint for all would count its blocks for each.
            raise Conflict(f"worker {worker_id!r} has {len(known)} ranks or models; select one by dp_rank and model")
        changes = [(registration, patched(registration, body)) for registration in known]
        for before, changed in changes:
            if before.source != REGISTER and msgspec.structs.replace(before, draining=changed.draining) != changed:
                place = PLACES.get(before.source, before.source)
                raise Conflict(
                    f"worker {worker_id!r} is kept by {place}: change it there; only its state can be patched here",
                    code="kept_by_source",
                )
            if body.state == "active" and changed.retiring:
                raise Conflict(
                    f"worker {worker_id!r} is drained by {PLACES.get(before.source, before.source)}: change it there",
                    code="kept_by_source",
                )
        for _, changed in changes:
            await core.register(changed)
        return respond(request, _described(changes[0][1]))

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


def _described(registration: Registration, dropped: int | msgspec.UnsetType = msgspec.UNSET) -> RegisteredReply:
    """The answer with what Dynamo's clients read of it."""
    lifecycle = INCOMPLETE if registration.url is None or registration.draining else SCHEDULABLE
    return RegisteredReply(
        "ok",
        registration.given_id,
        dropped,
        model_name=registration.worker.model,
        routing_group=ROUTING_GROUP,
        lifecycle=lifecycle if dropped is msgspec.UNSET else UNSCHEDULABLE,
        endpoint=registration.url,
        kv_events_endpoint=registration.events,
        replay_endpoint=registration.replay,
        block_size=registration.block_size,
        note=registration.note or msgspec.UNSET,
    )


def missing(worker_id: str, dp_rank: int | None, model: str | None) -> str:
    """The text for a worker that is not there."""
    rank = "" if dp_rank is None else f" rank {dp_rank}"
    of = "" if model is None else f" of model {model!r}"
    return f"no worker {worker_id!r}{rank}{of} is registered; GET /workers lists those that are"
