# SPDX-License-Identifier: Apache-2.0
"""What a `TextTokenizer` in front of one real engine makes of requests."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.route.tokens.client_body import read_client_body
from kvrouter.router.route.tokens.engine.client import Engine
from kvrouter.router.route.tokens.engine.verification import LocalMaker
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.tokenizer import TextTokenizer

TIMEOUT_S = 60.0


async def tokenized(
    model: str, engine: Engine, queries: Iterable[tuple[str, dict[str, Any]]], local: LocalMaker | None = None
) -> list[Prompt]:
    """queries: path and body of each request. Afterwards nothing is reported of the engine."""
    async with aiohttp.ClientSession() as session:
        tokenizing = TextTokenizer(
            models=lambda: [model],
            engines=lambda _: [engine],
            session=session,
            engine_key=EngineKey(None, AllowList()),
            local={} if local is None else {model: local},
            timeout_s=TIMEOUT_S,
            metrics=TokenMetrics(MetricRegistry()),
            clock=time.monotonic,
            rng=random.Random(1),
        )
        tokenizing.start()
        try:
            found = [
                await tokenizing.prompt(path, model, read_client_body(path, msgspec.json.encode(body)))
                for path, body in queries
            ]
            assert tokenizing.health() == []
            return found
        finally:
            await tokenizing.stop()
