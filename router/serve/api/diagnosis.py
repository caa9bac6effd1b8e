# SPDX-License-Identifier: Apache-2.0
"""The routes that show the fleet's problems and explain them, the store, and the settings."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request, Response

from kvrouter.contract.diagnosis import DiagnosisReport, ExplainedCode
from kvrouter.contract.settings import SettingsReply
from kvrouter.contract.store import StoreReply
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.observe.findings.explanations import explained_code
from kvrouter.router.serve.api.openapi import gives
from kvrouter.router.serve.api.workers import respond

MaxAge = Annotated[
    float, Query(ge=0, le=3_600, description="seconds; the last report is returned again if it is younger than this")
]


class DiagnosisPort(Protocol):
    """The diagnosis as the API sees it. `Diagnosis` of `router/app/diagnosis/diagnosis.py` implements it."""

    async def report(self, max_age_s: float = 0.0) -> DiagnosisReport:
        """Return a report that is younger than `max_age_s`; by default, look for problems now."""
        ...

    def settings(self) -> SettingsReply:
        """Return the settings of the process, without secrets."""
        ...

    async def store(self) -> StoreReply:
        """Return the view of the store, of the routers on it, and of the workers that each follows."""
        ...


def diagnosis_routes(diagnosis: DiagnosisPort | None) -> APIRouter:
    """Return the routes. With None for the diagnosis, their answers are empty."""
    router = APIRouter(tags=["watching"])

    @router.get(
        "/diagnosis",
        summary="The problems of the fleet, and how to fix them",
        operation_id="diagnosis",
        responses=gives(DiagnosisReport, 400),
    )
    async def report(request: Request, max_age_s: MaxAge = 0.0) -> Response:
        """List the findings of `kvrouter doctor` that the router itself can see, the gravest first.

        Takes up to 20 s in a large fleet, because it connects to every endpoint of the workers. With `max_age_s`, the
        last report is returned again if it is younger than that.
        """
        if diagnosis is None:
            return respond(request, DiagnosisReport(VERSION, 0, 0, 0, []))
        return respond(request, await diagnosis.report(max_age_s))

    @router.get(
        "/diagnosis/{code:name}",
        summary="The meaning of a finding's code",
        operation_id="explain_code",
        responses=gives(ExplainedCode, 404),
    )
    async def explained(request: Request, code: str) -> Response:
        """Explain a code, as `kvrouter doctor --explain CODE` does. For an unknown code, the error suggests some."""
        return respond(request, explained_code(code))

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

    @router.get(
        "/settings",
        summary="The settings of the process that answers, without secrets",
        operation_id="settings",
        responses=gives(SettingsReply),
    )
    async def settings(request: Request) -> Response:
        return respond(request, SettingsReply({}) if diagnosis is None else diagnosis.settings())

    return router
