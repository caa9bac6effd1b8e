# SPDX-License-Identifier: Apache-2.0
"""The routes by which a worker hands its cache over to its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from kvrouter.contract.hand_overs import DEFAULT_MAX_BYTES, DEFAULT_WITHIN_S, HandOverBody, HandOverPart, HandOverReply
from kvrouter.router.base.common.errors import UnknownHandOver
from kvrouter.router.model.workers.registration_from_body import dp_rank_of
from kvrouter.router.serve.api.openapi import gives, takes
from kvrouter.router.serve.api.ports import HandOverPort
from kvrouter.router.serve.api.requests import BodyReader
from kvrouter.router.serve.api.workers import respond

Number = Annotated[int, Path(ge=0, description="the number in the answer that began the hand-over")]


def hand_over_routes(hand_overs: HandOverPort) -> APIRouter:
    """Return the routes, bound to the fleet's hand-overs."""
    router = APIRouter(tags=["workers"])
    reader = BodyReader(HandOverBody)

    @router.post(
        "/workers/{worker_id:name}/hand_over",
        summary="Hand a worker's cache over",
        operation_id="hand_over",
        openapi_extra=takes(HandOverBody),
        responses=gives(HandOverReply, 400, 404, 409, 413),
    )
    async def begin(request: Request, worker_id: str) -> Response:
        """Have workers of the same model fetch what is worth most in this worker's CPU memory. It goes on after the answer."""
        body: HandOverBody = reader.read(await request.body(), request.headers.get("content-type", ""))
        number, parts = await hand_overs.begin(
            worker_id,
            dp_rank_of(body.dp_rank),
            body.model,
            None if body.to is None else {str(name) for name in body.to},
            DEFAULT_MAX_BYTES if body.max_bytes is None else body.max_bytes,
            DEFAULT_WITHIN_S if body.within_s is None else body.within_s,
        )
        return respond(request, HandOverReply(number, parts))

    @router.get(
        "/hand_overs/{number}",
        summary="The progress of a hand-over",
        operation_id="hand_over_progress",
        responses=gives(HandOverReply, 400, 404),
    )
    async def progress(request: Request, number: Number) -> Response:
        """Query the engines that take over. Engines keep the results of their last 16 hand-overs."""
        return respond(request, _known(number, await hand_overs.progress(number)))

    @router.delete(
        "/hand_overs/{number}",
        summary="End a hand-over",
        operation_id="stop_hand_over",
        responses=gives(HandOverReply, 400, 404),
    )
    async def stop(request: Request, number: Number) -> Response:
        """End a hand-over. Blocks that have arrived stay."""
        return respond(request, _known(number, await hand_overs.stop(number)))

    return router


def _known(number: int, parts: Sequence[HandOverPart]) -> HandOverReply:
    """Return the parts of a hand-over as the answer. Raises UnknownHandOver if no engine knows it."""
    if not parts:
        raise UnknownHandOver(
            f"no engine that answers knows the hand-over {number}: it restarted since, or had 16 further ones"
        )
    return HandOverReply(number, parts)
