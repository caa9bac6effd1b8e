# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application of the cold paths, and the assembly of the whole HTTP API."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from kvrouter.router.base.common.errors import (
    BadQuestion,
    MethodNotAllowed,
    NotFound,
    RouterError,
    StoreDown,
    internal_error,
)
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.shutdown import Shutdown
from kvrouter.router.base.common.version import PACKAGE, VERSION
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.settings import Config
from kvrouter.router.observe.decisions.watch import Watch
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.proxied_paths import PATHS
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.api.decisions import decision_routes
from kvrouter.router.serve.api.diagnosis import DiagnosisPort, diagnosis_routes
from kvrouter.router.serve.api.events import EventStream
from kvrouter.router.serve.api.hand_overs import hand_over_routes
from kvrouter.router.serve.api.health import watch_routes
from kvrouter.router.serve.api.history import HistoryPort, history_routes
from kvrouter.router.serve.api.http.guard import Guard
from kvrouter.router.serve.api.http.http_api import HotHandler, HttpApi, headers_of, label_of
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.api.models import model_routes
from kvrouter.router.serve.api.openapi import EVENTS
from kvrouter.router.serve.api.page import page_routes
from kvrouter.router.serve.api.ports import CorePort, HandOverPort, SourcesPort, TokensPort
from kvrouter.router.serve.api.query import QueryRoutes
from kvrouter.router.serve.api.reservations import end_here, load_routes
from kvrouter.router.serve.api.responses import encode
from kvrouter.router.serve.api.scopes import OPEN_PATHS, RouteTable
from kvrouter.router.serve.api.select import SelectRoutes
from kvrouter.router.serve.api.versioned_paths import VersionedPaths
from kvrouter.router.serve.api.workers import worker_routes
from kvrouter.router.serve.page.page_files import FILES, INDEX, login_page, page_files
from kvrouter.router.serve.proxy.proxy import Proxy

if TYPE_CHECKING:
    from kvrouter.router.observe.quality.tracing import Tracing

log = logging.getLogger(__name__)


def _answer(request: Request, error: RouterError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer with an error, in the encoding that the client accepts."""
    content, media_type = encode(error.body(), request.headers.get("accept", ""))
    return Response(content, error.status, headers, media_type)


async def _on_router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return _answer(request, error, {name.decode(): value.decode() for name, value in headers_of(error)})


async def _on_store_error(request: Request, error: Exception) -> Response:
    log.warning("store error", extra={"path": label_of(request.scope), "error": str(error)})
    return _answer(request, StoreDown(f"the store cannot be used now: {error}; try again"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        # Starlette names only the methods of the first route with this path.
        allowed = ", ".join(
            sorted({method for route in request.app.state.routes for method in _methods(route, request)})
        )
        text = f"{printable(request.scope['path'])} takes {allowed or 'another method'}, not {request.method}"
        return _answer(request, MethodNotAllowed(text, allowed=allowed), {"allow": allowed})
    if error.status_code == 404:
        return _answer(
            request, NotFound(f"there is no {printable(request.scope['path'])}; GET /docs lists what there is")
        )
    return _answer(request, BadQuestion(str(error.detail)))


def _methods(route: BaseRoute, request: Request) -> Iterable[str]:
    """Return the methods of `route` if it matches the request's path, or none."""
    if not isinstance(route, APIRoute) or not route.path_regex.match(request.scope["path"]):
        return ()
    return route.methods or ()


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _answer(request, BadQuestion(f"parameter {first['loc'][-1]}: {first['msg']}"))


async def _refuse_repeated(request: Request) -> None:
    """Refuse a query parameter that is given twice, because it is not known which of the values counts.

    FastAPI runs a dependency that is no coroutine in a thread, which costs more than the check.
    """
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name in seen:
            raise BadQuestion(f"parameter {printable(name)} is given twice; give it once")
        seen.add(name)


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer; `HttpApi` then logs and counts it.
    content, media_type = encode(internal_error(), request.headers.get("accept", ""))
    return Response(content, 500, media_type=media_type)


def build_api(
    core: CorePort,
    placer: Placer,
    config: Config,
    metrics: HttpMetrics,
    clock: Callable[[], float],
    tokens: TokensPort | None = None,
    proxy: Proxy | None = None,
    tracing: Tracing | None = None,
    sources: SourcesPort | None = None,
    shutdown: Shutdown | None = None,
    watch: Watch | None = None,
    diagnosis: DiagnosisPort | None = None,
    access: Access | None = None,
    history: HistoryPort | None = None,
    hand_overs: HandOverPort | None = None,
) -> HttpApi:
    """Return the whole HTTP API. It holds no global state, so several may exist in one process.

    Args:
        core: The index and its workers.
        placer: Places prompts.
        config: The settings.
        metrics: The metrics of HTTP.
        clock: Returns monotonic seconds; measures decisions.
        tokens: Tokenizes texts; without it, texts are refused.
        proxy: Forwards requests to engines; without it, none are forwarded.
        tracing: None turns traces off.
        sources: The sources of workers, which report their problems.
        shutdown: Set when the process is to end.
        watch: The events and decisions; without it, neither is shown.
        diagnosis: Looks for problems; without it, none are reported.
        access: Decides which clients are admitted; without it, the settings at this time decide.
        history: The traffic of the last day and the savings; without it, neither is shown.
        hand_overs: Has workers hand their caches over; without it, none do.
    """
    shutdown = shutdown or Shutdown()
    access = access or Access(
        LiveSettings(config, metrics=metrics.access.files), metrics.access, clock=time.monotonic, wall_clock=time.time
    )
    app = FastAPI(
        title=PACKAGE,
        version=VERSION,
        description="Predicts how many tokens of a prompt each engine replica will reuse, and routes by it.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(_refuse_repeated)],
        exception_handlers={
            RouterError: _on_router_error,
            StoreError: _on_store_error,
            HTTPException: _on_http_error,
            RequestValidationError: _on_bad_parameter,
            Exception: _on_bug,
        },
    )
    watching = watch_routes(core, placer, tokens, proxy, sources, metrics, shutdown, app, access, config)
    asking = QueryRoutes(core, metrics, clock)
    selecting = SelectRoutes(core, placer, tokens, asking, metrics, clock)
    pages = page_files()
    app.state.routes = []
    for router in (
        worker_routes(core, tokens, proxy, sources),
        *([] if hand_overs is None else [hand_over_routes(hand_overs)]),
        load_routes(core, placer, selecting),
        model_routes(core),
        watching,
        *([] if watch is None else [decision_routes(watch)]),
        diagnosis_routes(diagnosis),
        *([] if history is None else [history_routes(history)]),
        page_routes(pages),
    ):
        app.include_router(router)
        app.state.routes += router.routes
    hot: dict[str, HotHandler] = {
        "/query": asking.query,
        "/query_by_hash": asking.query_by_hash,
        "/select": selecting.select,
        "/select_and_reserve": selecting.select_and_reserve,
    }
    streams = {} if watch is None else {EVENTS: EventStream(watch.feed).forward}
    # Pages and the OpenAPI document have no version, because people and tools look for them at their fixed paths.
    described = (route.path for route in app.state.routes if isinstance(route, APIRoute) and route.include_in_schema)
    app.state.paths = VersionedPaths([*hot, EVENTS, *described])
    return HttpApi(
        hot,
        streams,
        partial(end_here, placer),
        app,
        config,
        metrics,
        proxy,
        tracing,
        clock,
        shutdown,
        paths=app.state.paths,
        guard=Guard(
            access,
            RouteTable(
                app.state.routes, [*(("POST", path) for path in (*hot, *PATHS)), *(("GET", path) for path in streams)]
            ),
            OPEN_PATHS.union(f"{FILES}{name}" for name in pages),
        ),
        login=login_page(pages[INDEX]),
    )
