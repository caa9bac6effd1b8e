# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the fleet, and who follows whom, as this process sees it."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Request, Response

from kvrouter.router.base.common.version import VERSION
from kvrouter.router.observe.findings.finding import DiagnosisReport
from kvrouter.router.observe.findings.store_view import StoreReply
from kvrouter.router.serve.api.openapi import gives
from kvrouter.router.serve.api.workers import respond


class DiagnosisPort(Protocol):
    """`router.diagnosis.diagnosis.Diagnosis` satisfies it."""

    async def report(self) -> DiagnosisReport: ...

    async def store(self) -> StoreReply: ...


def diagnosis_routes(diagnosis: DiagnosisPort | None) -> APIRouter:
    """None: nothing is looked at."""
    router = APIRouter(tags=["watching"])

    @router.get(
        "/diagnosis",
        summary="What is wrong, and what mends it",
        operation_id="diagnosis",
        responses=gives(DiagnosisReport),
    )
    async def report(request: Request) -> Response:
        """Findings of `kvrouter doctor` that the router itself can see, the gravest first; takes up to some seconds, as
        it connects to every endpoint of the workers."""
        found = DiagnosisReport(VERSION, 0, 0, 0, []) if diagnosis is None else await diagnosis.report()
        return respond(request, found)

    @router.get(
        "/store",
        summary="Redis, the routers on it, and who follows whom",
        operation_id="store",
        responses=gives(StoreReply),
    )
    async def store(request: Request) -> Response:
        """As this process sees them. It asks Redis for its settings: up to some seconds."""
        found = StoreReply(True, "", [], [], []) if diagnosis is None else await diagnosis.store()
        return respond(request, found)

    return router
