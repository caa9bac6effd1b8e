# SPDX-License-Identifier: Apache-2.0
"""The tokens that a `TextTokenizer` with one real engine produces for requests."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.engines.known import RENDERER_WAYS
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.renderer_spec import RendererSpec
from kvrouter.router.route.tokens.client_body import read_client_body
from kvrouter.router.route.tokens.engine.client import Engine
from kvrouter.router.route.tokens.engine.verification import LocalMaker
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.tokenizer import TextTokenizer

TIMEOUT_S = 60.0


async def tokenized(
    model: str,
    engine: Engine,
    queries: Iterable[tuple[str, dict[str, Any]]],
    local: LocalMaker | None = None,
    renderers: Sequence[str] = (),
) -> list[Prompt]:
    """Return the prompt of each request, and check that the tokenizer then reports no problem of the engine.

    Args:
        model: The name of the model.
        engine: The engine that serves it.
        queries: The path and the body of each request.
        local: Makes the model's tokenizer in the router; None for the engine's tokens alone.
        renderers: The URLs of the model's renderers.
    """
    async with aiohttp.ClientSession() as session:
        tokenizer = TextTokenizer(
            models=lambda: [model],
            workers=lambda _: 1,
            engines=lambda _: [engine],
            session=session,
            engine_key=EngineKey(None, AllowList()),
            local={} if local is None else {model: local},
            renderers=[RendererSpec(model, url, None) for url in renderers],
            renderer_ways=RENDERER_WAYS,
            timeout_s=TIMEOUT_S,
            metrics=TokenMetrics(MetricRegistry()),
            clock=time.monotonic,
            rng=random.Random(1),
        )
        tokenizer.start()
        try:
            prompts = [
                await tokenizer.prompt(path, model, read_client_body(path, msgspec.json.encode(body)))
                for path, body in queries
            ]
            assert tokenizer.health() == [], tokenizer.health()
            return prompts
        finally:
            await tokenizer.stop()
