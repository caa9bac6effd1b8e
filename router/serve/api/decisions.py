# SPDX-License-Identifier: Apache-2.0
"""The routes that explain why requests went where they went, also afterwards."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from kvrouter.contract.decisions import DecisionReply, DecisionsReply, Wanted
from kvrouter.router.base.common.errors import UnknownDecision
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.observe.decisions.decision_log import DecisionFilter
from kvrouter.router.observe.decisions.watch import Watch
from kvrouter.router.serve.api.decision_reply import (
    find_decision,
    joined,
    list_decisions,
    read_decision,
    read_decisions,
)
from kvrouter.router.serve.api.openapi import gives
from kvrouter.router.serve.api.workers import respond

MAX_LISTED = 1_000

Limit = Annotated[int, Query(ge=1, le=MAX_LISTED, description="how many, the newest first")]

Worker = Annotated[str | None, Query(description="only those that chose this worker: its id, or ID@RANK")]
Model = Annotated[str | None, Query(description="only those for this model")]
Only = Annotated[
    Wanted | None,
    Query(
        description="wrong: the delivered reuse differs from the predicted one; lost: another worker would have reused "
        "more; failed: the outcome is neither ok nor client_gone"
    ),
]


def decision_routes(watch: Watch) -> APIRouter:
    """Return the routes, bound to the kept decisions."""
    router = APIRouter(tags=["watching"])

    @router.get(
        "/decisions",
        summary="The last decisions",
        operation_id="list_decisions",
        responses=gives(DecisionsReply, 400),
    )
    async def listed(
        request: Request, limit: Limit = 100, worker: Worker = None, model: Model = None, only: Only = None
    ) -> Response:
        """List the last decisions: all, or only those for a worker, for a model, or that went wrong."""
        wanted = DecisionFilter(worker, model, only)
        reply = list_decisions(watch.decisions, limit, wanted)
        if watch.lists_elsewhere is not None:
            elsewhere = await watch.lists_elsewhere(limit, wanted)
            reply = joined([reply, *read_decisions(elsewhere)], limit)
        return respond(request, reply)

    @router.get(
        "/decisions/{name:name}",
        summary="Why a request went where it went",
        operation_id="explain_decision",
        responses=gives(DecisionReply, 404),
    )
    async def explained(request: Request, name: str) -> Response:
        """Explain one decision.

        The name is the id of a selection, or the x-request-id of a request, which means its last attempt.
        """
        reply = find_decision(watch.decisions, name)
        if reply is None and watch.elsewhere is not None:
            elsewhere = await watch.elsewhere(name)
            reply = None if elsewhere is None else read_decision(elsewhere)
        if reply is None:
            raise UnknownDecision(
                f"no decision {printable(name[:80])!r} is kept: it is too old (decisions_kept), was made by another "
                "router, or never was"
            )
        return respond(request, reply)

    return router
