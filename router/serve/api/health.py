# SPDX-License-Identifier: Apache-2.0
"""The routes of health, readiness, metrics, version, and the description of the API."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvrouter.contract.health import HealthReply, ReadyReply, VersionReply
from kvrouter.router.base.common.errors import NoWorker
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.shutdown import Shutdown
from kvrouter.router.base.common.version import PACKAGE, VERSION
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.api.openapi import document, gives, page
from kvrouter.router.serve.api.ports import CorePort, SourcesPort, TokensPort
from kvrouter.router.serve.api.workers import respond
from kvrouter.router.serve.proxy.proxy import Proxy

STOPPING = "this router is shutting down; send new requests to another one"


def watch_routes(
    core: CorePort,
    placer: Placer,
    tokens: TokensPort | None,
    proxy: Proxy | None,
    sources: SourcesPort | None,
    shown: HttpMetrics,
    shutdown: Shutdown,
    app: FastAPI,
    access: Access,
    config: Config,
) -> APIRouter:
    """Return the routes, bound to the core and to the metrics that `/metrics` shows."""
    router = APIRouter(tags=["watching"])
    needs_key = access.keys is not None

    @router.get("/health", summary="Does the process serve?", operation_id="health", responses=gives(HealthReply))
    async def health(request: Request) -> Response:
        """200 as long as the process serves; `degraded` comes with its reasons; warnings degrade nothing."""
        reasons = [*core.health(), *placer.health(), *(() if tokens is None else tokens.health())]
        reasons += () if proxy is None else proxy.health()
        reasons += () if sources is None else sources.health()
        reasons += access.health()
        warnings = [*core.cautions(), *access.cautions()]
        return respond(request, HealthReply("degraded" if reasons else "ok", reasons, warnings or None))

    @router.get("/ready", summary="Can a worker be chosen?", operation_id="ready", responses=gives(ReadyReply, 503))
    async def ready(request: Request) -> Response:
        """503 with the reason while `/select` would place no request, and from SIGTERM on."""
        reason = STOPPING if shutdown.begun else core.readiness()
        waiting = [] if sources is None or shutdown.begun else sources.statuses()
        if reason is not None and waiting and not core.registrations():
            first = waiting[0]
            more = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            reason = f"worker {printable(first.worker_id)} is {first.reason}{more}"
        if reason is not None:
            raise NoWorker(f"not ready: {reason}", code="not_ready")
        try:
            takers = placer.takers(core.models())
        except NoWorker as error:
            raise NoWorker(f"not ready: {error.message}", code="not_ready") from None
        return respond(request, ReadyReply("ready", True, len({worker[:2] for worker in takers})))

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        operation_id="metrics",
        response_class=Response,
        responses={200: {"description": "Done", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(await shown.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/version", summary="Name and version", operation_id="version", responses=gives(VersionReply))
    async def version(request: Request) -> Response:
        links = (config.documentation_url, config.grafana_url, config.trace_url)
        return respond(request, VersionReply(PACKAGE, VERSION, *links))

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return respond(request, document(app, needs_key=needs_key))

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page(document(app, needs_key=needs_key)), media_type="text/html")

    return router
