# SPDX-License-Identifier: Apache-2.0
"""The routes of the registered models, in the form of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvrouter.contract.models import ModelReply, ModelsReply
from kvrouter.router.model.workers.model_names import unknown_model
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.api.openapi import gives
from kvrouter.router.serve.api.ports import CorePort
from kvrouter.router.serve.api.requests import BOUNDS
from kvrouter.router.serve.api.workers import respond


def model_routes(core: CorePort) -> APIRouter:
    """Return the routes, bound to the core."""
    router = APIRouter(tags=["models"])

    def named(request: Request) -> list[str]:
        """Return the names that the request's key may name."""
        bounds: KeyBounds | None = request.scope.get(BOUNDS)
        models = None if bounds is None else bounds.models
        return [name for name in core.names() if models is None or name in models]

    @router.get("/v1/models", summary="All models", operation_id="models", responses=gives(ModelsReply))
    async def models(request: Request) -> Response:
        """List all names that a request's `model` may have."""
        return respond(request, ModelsReply([ModelReply(model) for model in named(request)]))

    @router.get("/v1/models/{model:name}", summary="One model", operation_id="model", responses=gives(ModelReply, 404))
    async def show_model(request: Request, model: str) -> Response:
        names = named(request)
        if model not in names:
            raise unknown_model(model, names)
        return respond(request, ModelReply(model))

    return router
