# SPDX-License-Identifier: Apache-2.0
"""The part of vLLM's OpenAI server that a router and its tests talk to: completions of token ids, models, health.

There is no tokenizer: a prompt is a list of token ids, and a completion's text is its token ids in decimal. It does not
stream, batch or sample; what it cannot do it refuses with the error shape that vLLM uses.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from kvrouter.simulator.replica import Completion, Replica, RequestRefused

# vLLM's default for /v1/completions.
DEFAULT_MAX_TOKENS = 16

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class CompletionBody(msgspec.Struct):
    """What is read of a completion request; other fields are ignored, as sampling does not exist here."""

    prompt: list[TokenId]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = DEFAULT_MAX_TOKENS
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    return_token_ids: bool | None = False
    stream: bool | None = False
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = 1


def _error(status: int, message: str, code: str) -> JSONResponse:
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, status)


def _reply(completion: Completion, *, number: int, model: str, created: int, token_ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": " ".join(map(str, completion.output)),
        "logprobs": None,
        "finish_reason": "length",
    }
    if token_ids:
        choice["token_ids"] = list(completion.output)
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.output),
            "total_tokens": completion.prompt_tokens + len(completion.output),
            "prompt_tokens_details": {"cached_tokens": completion.reused_tokens},
        },
    }


def build_app(replica: Replica, *, model: str, clock: Callable[[], float]) -> FastAPI:
    """The HTTP app of one replica. Requests run one after another, in the order in which they get the replica."""
    app = FastAPI(title="kvrouter simulator", docs_url=None, redoc_url=None, openapi_url=None)
    decoder = msgspec.json.Decoder(CompletionBody)
    turn = threading.Lock()
    numbers = itertools.count(1)
    started = int(clock())

    def run(body: CompletionBody) -> Completion:
        with turn:
            return replica.run(
                body.prompt, max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS, cache_salt=body.cache_salt
            )

    def reset() -> bool:
        with turn:
            return replica.reset_prefix_cache()

    async def completions(request: Request) -> Response:
        try:
            body = decoder.decode(await request.body())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(
                400, f"{error}; the prompt must be one list of token ids, as there is no tokenizer", "bad_body"
            )
        if body.model not in (None, model):
            return _error(
                404, f"the model `{body.model}` does not exist; this replica serves `{model}`", "unknown_model"
            )
        if body.stream:
            return _error(400, "the simulator does not stream; leave `stream` out", "unsupported")
        try:
            completion = await run_in_threadpool(run, body)
        except RequestRefused as error:
            return _error(400, str(error), "does_not_fit")
        return JSONResponse(
            _reply(
                completion,
                number=next(numbers),
                model=model,
                created=int(clock()),
                token_ids=bool(body.return_token_ids),
            )
        )

    async def models() -> Response:
        card = {"id": model, "object": "model", "created": started, "owned_by": "kvrouter-simulator"}
        return JSONResponse({"object": "list", "data": [card]})

    async def health() -> Response:
        return Response()

    async def reset_prefix_cache() -> Response:
        return JSONResponse({"success": await run_in_threadpool(reset)})

    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"])
    return app
