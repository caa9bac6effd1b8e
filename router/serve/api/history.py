# SPDX-License-Identifier: Apache-2.0
"""The routes that show the traffic of the last day, and the savings of the last weeks."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request, Response

from kvrouter.contract.history import MAX_DAYS, RANGES_S, HistoryReply, Range, SavingsReply
from kvrouter.router.serve.api.openapi import gives
from kvrouter.router.serve.api.workers import respond

WantedRange = Annotated[Range, Query(alias="range", description="15m and 1h have steps of 5 s, 24h of 60 s")]
OneModel = Annotated[str | None, Query(description="only this model; without it, the sums of all models")]
OneModelOfDays = Annotated[str | None, Query(alias="model", description="only this model")]
Days = Annotated[int, Query(ge=1, le=MAX_DAYS, description="how many days, today included")]


class HistoryPort(Protocol):
    """The history as the API sees it. `HistoryKeeper` of `router/observe/history/history_keeper.py` implements it."""

    def reply(self, range_s: int, model: str | None) -> HistoryReply:
        """Return the traffic of a range of RANGES_S, of one model or of all."""
        ...

    async def savings(self, days: int, model: str | None) -> SavingsReply:
        """Return the savings of the last days, of one model or of each. Raises StoreError."""
        ...


def history_routes(history: HistoryPort) -> APIRouter:
    """Return the routes, bound to the history."""
    router = APIRouter(tags=["watching"])

    @router.get(
        "/history",
        summary="Requests, reuse and first tokens of the last minutes, hour or day",
        operation_id="history",
        responses=gives(HistoryReply, 400),
    )
    async def shown(request: Request, wanted: WantedRange = Range.HOUR, model: OneModel = None) -> Response:
        """Return the traffic of all routers on the store. A step is shown some seconds after its end."""
        return respond(request, history.reply(RANGES_S[wanted], model))

    @router.get(
        "/savings",
        summary="Prompt tokens that were not computed, by day and model, and an estimate for round robin",
        operation_id="savings",
        responses=gives(SavingsReply, 400, 503),
    )
    async def saved(request: Request, days: Days = 7, model: OneModelOfDays = None) -> Response:
        """Return the sums of the last days from Redis. They lag by some seconds."""
        return respond(request, await history.savings(days, model))

    return router
