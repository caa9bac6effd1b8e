# SPDX-License-Identifier: Apache-2.0
"""The routes of reservations that outlive their request, and of the load of all workers.

The shapes are those of Dynamo's selection service.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from msgspec import UNSET

from kvrouter.contract.loads import EngineReply, ModelLoadReply, WorkerLoadReply
from kvrouter.contract.reservations import EndedReply, ReservationBody, ReservedReply
from kvrouter.router.route.load.load_messages import PREFILL_COMPLETE, RELEASE
from kvrouter.router.route.placement.placer import Placer, WorkerLoadView
from kvrouter.router.serve.api.dynamo_shapes import ROUTING_GROUP
from kvrouter.router.serve.api.openapi import gives, takes
from kvrouter.router.serve.api.ports import CorePort
from kvrouter.router.serve.api.requests import BOUNDS
from kvrouter.router.serve.api.responses import encode
from kvrouter.router.serve.api.select import SelectRoutes, decode_blocks

# The routes that end a reservation, or a part of it, and the part that each ends.
RELEASE_ROUTE = "/reservations/{selection_id}"
PREFILL_ROUTE = RELEASE_ROUTE + "/prefill_complete"
BLOCK_ROUTE = RELEASE_ROUTE + "/output_block"
ENDINGS = {
    ("DELETE", RELEASE_ROUTE): RELEASE,
    ("POST", PREFILL_ROUTE): PREFILL_COMPLETE,
    ("POST", BLOCK_ROUTE): PREFILL_COMPLETE,
}
ENDED = EndedReply("ok")

OneModel = Annotated[str | None, Query(alias="model_name", description="only this model")]


def end_here(placer: Placer, method: str, path: str) -> str | None:
    """End a reservation of this process without waiting, and return the route of the request that ends it.

    Return None if the request is another one or the reservation belongs to another process; nothing has changed then.
    """
    selection_id, slash, part = path.removeprefix("/reservations/").partition("/")
    route = f"{RELEASE_ROUTE}{slash}{part}"
    how = ENDINGS.get((method, route))
    return route if how is not None and placer.end_here(selection_id, how) else None


def load_routes(core: CorePort, placer: Placer, selecting: SelectRoutes) -> APIRouter:
    """Return the routes, bound to the placer. `core` has the workers' ids as they were registered."""
    router = APIRouter(tags=["load"])

    def respond(request: Request, reply: Any, status: int = 200) -> Response:
        content, media_type = encode(reply, request.headers.get("accept", ""))
        return Response(content, status, media_type=media_type)

    @router.post(
        "/reservations",
        summary="Count a prompt's load at a worker that the client has chosen",
        operation_id="reserve",
        status_code=201,
        openapi_extra=takes(ReservationBody),
        responses=gives(ReservedReply, 400, 404, 409, 413, 503, status=201),
    )
    async def reserve(request: Request) -> Response:
        content_type, bounds = request.headers.get("content-type", ""), request.scope.get(BOUNDS)
        placement = await selecting.reserve_at(await request.body(), content_type, bounds)
        worker = placement.worker
        worker_id = core.given_id(worker)
        reply = ReservedReply(
            placement.selection_id, worker.model, ROUTING_GROUP, worker_id, worker.dp_rank, placement.url
        )
        return respond(request, reply, 201)

    @router.delete(
        RELEASE_ROUTE,
        summary="The request is over: its load counts no longer",
        operation_id="release",
        responses=gives(EndedReply, 404, 503),
    )
    async def release(request: Request, selection_id: str) -> Response:
        """Works at any router process, whichever made the reservation."""
        await placer.release(selection_id)
        return respond(request, ENDED)

    @router.post(
        PREFILL_ROUTE,
        summary="The first token came: the prefill counts no longer",
        operation_id="prefill_complete",
        responses=gives(EndedReply, 404, 413, 503),
    )
    async def prefill_complete(request: Request, selection_id: str) -> Response:
        """Repeating it changes nothing."""
        await placer.prefill_complete(selection_id)
        return respond(request, ENDED)

    @router.post(
        BLOCK_ROUTE,
        summary="A block of the answer came: the prefill counts no longer",
        operation_id="output_block",
        responses=gives(EndedReply, 404, 413, 503),
    )
    async def output_block(request: Request, selection_id: str) -> Response:
        """Mark the prefill as complete, and change nothing else.

        A block of the answer adds no load, because the expected length of the answer was counted with its prompt.
        """
        await placer.prefill_complete(selection_id)
        return respond(request, ENDED)

    @router.get(
        "/loads", summary="The load of all workers", operation_id="loads", responses=gives(ModelLoadReply, many=True)
    )
    async def loads(request: Request, model: OneModel = None) -> Response:
        by_model: dict[str, list[WorkerLoadView]] = {}
        for view in placer.burdens():
            if model in (None, view.worker.model):
                by_model.setdefault(view.worker.model, []).append(view)
        return respond(request, [_model_load(name, views) for name, views in by_model.items()])

    def _model_load(name: str, views: list[WorkerLoadView]) -> ModelLoadReply:
        """Return the entry of one model."""
        block_tokens = placer.hash_block_size(name)
        waiting, tokens = placer.waiting(name)
        loads = [_worker_load(view, core.given_id(view.worker), block_tokens, placer.now()) for view in views]
        return ModelLoadReply(name, ROUTING_GROUP, loads, waiting, tokens)

    return router


def _worker_load(view: WorkerLoadView, worker_id: str | int, block_tokens: int, now: float) -> WorkerLoadReply:
    """Return the entry of one worker."""
    burden, report = view.burden, view.engine
    engine = None
    if report is not None:
        engine_load = report.engine_load
        engine = EngineReply(
            engine_load.waiting, engine_load.running, engine_load.kv_usage, round(now - report.heard_s, 3)
        )
    return WorkerLoadReply(
        worker_id,
        view.worker.dp_rank,
        burden.queued_tokens,
        decode_blocks(burden.decode_tokens, block_tokens),
        burden.requests,
        burden.decode_tokens,
        burden.saturated,
        engine,
        view.prefill_rate,
        view.decode_rate,
        burden.lent_tokens if view.lends or burden.lent_tokens else UNSET,
    )
