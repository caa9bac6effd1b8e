# SPDX-License-Identifier: Apache-2.0
"""A `TextTokenizer` with scripted engines, and its metrics."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client import Gauge

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.engines.known import RENDERER_WAYS
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.renderer_spec import RendererSpec
from kvrouter.router.route.tokens.client_body import CHAT_PATH, RESPONSES_PATH, TEXT_PATH, read_client_body
from kvrouter.router.route.tokens.engine.client import Engine
from kvrouter.router.route.tokens.engine.verification import LocalMaker
from kvrouter.router.route.tokens.engine.wire import RenderQuirks
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import TokenRequest
from kvrouter.router.route.tokens.tokenizer import TextTokenizer
from tests.support.token_engine import TokenEngine, tokens_of

MODEL = "m"
# The longest wait; only a failing test reaches it.
PATIENCE_S = 20.0
CHAT = {"messages": [{"role": "user", "content": "Hi 🙂"}]}
RENDER_CHAT = "/v1/chat/completions/render"
RENDER_TEXT = "/v1/completions/render"
NO_RENDER = {RENDER_CHAT: 403, RENDER_TEXT: 403}
# The endpoints that a renderer does not have, with their status.
NO_ENGINE = {CHAT_PATH: 404, TEXT_PATH: 404, "/v1/messages/count_tokens": 404}


class Here:
    """A local tokenizer with the same tokens as the scripted engine, but for requests with the feature `wrong`."""

    held_bytes = 0
    reads_responses = False

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.made = 0

    def ids(self, request: TokenRequest, quirks: RenderQuirks) -> NDArray[np.int64]:
        self.made += 1
        if (request.kind == "responses" and not self.reads_responses) or request.has("chat_template"):
            raise TokensUnknown("unsupported", "chat_template is not read here")
        body = {name: request.value(name) for name in request.fields}
        tokens = tokens_of(body, drop_tools=not quirks.keeps_unused_tools)
        return np.array([7, *tokens] if self.wrong in request.features else tokens, np.int64)

    def likely_quirks(self) -> tuple[RenderQuirks, ...]:
        return (RenderQuirks(), RenderQuirks(keeps_unused_tools=False))


class Case:
    """The tokenizer under test with its engines and its metrics."""

    def __init__(
        self,
        tokenizing: TextTokenizer,
        engines: list[TokenEngine],
        metrics: TokenMetrics,
        renderers: list[TokenEngine],
    ) -> None:
        self.tokenizing = tokenizing
        self.engines = engines
        self.renderers = renderers
        # Whether each engine drains.
        self.drains = [False] * len(engines)
        self.metrics = metrics
        self.lives = ["1"] * len(engines)
        self.workers = len(engines)

    async def chat(self, **changes: Any) -> Prompt:
        return await self.tokenizing.prompt(
            CHAT_PATH, MODEL, read_client_body(CHAT_PATH, msgspec.json.encode(CHAT | changes))
        )

    async def text(self, prompt: Any, **more: Any) -> Prompt:
        return await self.tokenizing.prompt(
            TEXT_PATH, MODEL, read_client_body(TEXT_PATH, msgspec.json.encode({"prompt": prompt} | more))
        )

    async def response(self, **body: Any) -> Prompt:
        return await self.tokenizing.prompt(
            RESPONSES_PATH, MODEL, read_client_body(RESPONSES_PATH, msgspec.json.encode(body))
        )

    def asked(self, *paths: str) -> int:
        return sum(engine.paths().count(path) for engine in self.engines for path in paths)

    def shown(self, gauge: Gauge) -> float:
        """Return the value that the metrics page shows."""
        (family,) = gauge.collect()
        return float(family.samples[0].value)

    def counted(self, reason: str) -> float:
        return self.metrics.unknown.labels(reason).value


@asynccontextmanager
async def case(
    engines: int = 1,
    local: LocalMaker | None = None,
    timeout_s: float = PATIENCE_S,
    renderers: int = 0,
    key: str | None = None,
    engine_key: EngineKey | None = None,
    **settings: Any,
) -> AsyncIterator[Case]:
    """Run a tokenizer over scripted engines.

    Args:
        engines: The number of engines.
        local: Makes the tokenizer in the router; None for the engines alone.
        timeout_s: The tokenizer's timeout.
        renderers: The number of renderers of the model.
        key: The name of the renderers' API key.
        engine_key: The keys of engines; None for no keys.
        **settings: Attributes of each engine.
    """
    metrics = TokenMetrics(MetricRegistry())
    running = [TokenEngine() for _ in range(engines)]
    rendering = [TokenEngine() for _ in range(renderers)]
    async with aiohttp.ClientSession() as session:
        for renderer in rendering:
            await renderer.__aenter__()
            renderer.statuses = dict(NO_ENGINE)
        for engine in running:
            await engine.__aenter__()
            for name, value in settings.items():
                setattr(engine, name, value)
        local_makers: Mapping[str, LocalMaker] = {} if local is None else {MODEL: local}
        stage: Case
        tokenizer = TextTokenizer(
            models=lambda: [MODEL],
            workers=lambda _: stage.workers,
            engines=lambda _: [
                Engine(e.url, life, VLLM.tokens, drains)
                for e, life, drains in zip(stage.engines, stage.lives, stage.drains, strict=True)
            ],
            session=session,
            engine_key=engine_key or EngineKey(None, AllowList()),
            local=local_makers,
            renderers=[RendererSpec(MODEL, renderer.url, key) for renderer in rendering],
            renderer_ways=RENDERER_WAYS,
            timeout_s=timeout_s,
            metrics=metrics,
            clock=time.monotonic,
            rng=random.Random(1),
        )
        stage = Case(tokenizer, running, metrics, rendering)
        tokenizer.start()
        try:
            yield stage
        finally:
            await tokenizer.stop()
            for engine in running + rendering:
                await engine.__aexit__()


async def until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        await asyncio.sleep(0.01)


def ids(prompt: Prompt) -> list[int] | None:
    return None if prompt.token_ids is None else prompt.token_ids.tolist()
