# SPDX-License-Identifier: Apache-2.0
"""The routes that show the fleet's problems, and which router follows each worker, as this process sees them."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Request, Response

from kvrouter.contract.diagnosis import DiagnosisReport
from kvrouter.contract.store import StoreReply
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.serve.api.openapi import gives
from kvrouter.router.serve.api.workers import respond


class DiagnosisPort(Protocol):
    """The diagnosis as the API sees it. `Diagnosis` of `router/app/diagnosis/diagnosis.py` implements it."""

    async def report(self) -> DiagnosisReport:
        """Look for problems now, and return the findings."""
        ...

    async def store(self) -> StoreReply:
        """Return the view of the store, of the routers on it, and of the workers that each follows."""
        ...


def diagnosis_routes(diagnosis: DiagnosisPort | None) -> APIRouter:
    """Return the routes. With None for the diagnosis, their answers are empty."""
    router = APIRouter(tags=["watching"])

    @router.get(
        "/diagnosis",
        summary="What is wrong, and what mends it",
        operation_id="diagnosis",
        responses=gives(DiagnosisReport),
    )
    async def report(request: Request) -> Response:
        """List the findings of `kvrouter doctor` that the router itself can see, the gravest first.

        Takes up to some seconds, as it connects to every endpoint of the workers.
        """
        diagnosis_report = DiagnosisReport(VERSION, 0, 0, 0, []) if diagnosis is None else await diagnosis.report()
        return respond(request, diagnosis_report)

    @router.get(
        "/store",
        summary="Redis, the routers on it, and who follows whom",
        operation_id="store",
        responses=gives(StoreReply),
    )
    async def store(request: Request) -> Response:
        """Show the store as this process sees it. It queries Redis for its settings, which takes up to some seconds."""
        store_reply = StoreReply(True, "", [], [], []) if diagnosis is None else await diagnosis.store()
        return respond(request, store_reply)

    return router
