# SPDX-License-Identifier: Apache-2.0
"""The tokens of messages of Anthropic's API from scripted engines of SGLang, which reads them in its own way."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.engines.known import ENGINES, RENDERER_WAYS
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.renderer_spec import RendererSpec
from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    TEXT_PATH,
    read_client_body,
)
from kvrouter.router.route.tokens.engine.client import Engine
from kvrouter.router.route.tokens.engine.wire import COUNT_PATH, RenderQuirks, chat_of
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.thinking import NO_SWITCH, ThinkingHistory, ThinkingSwitch
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from kvrouter.router.route.tokens.tokenizer import TextTokenizer
from kvrouter.router.route.tokens.unknown_prompts import COUNTED_MIN
from tests.support.token_engine import TokenEngine

MODEL = "m"
TIMEOUT_S = 20.0
THINK = ThinkingHistory(("<think>", "\n</think>"))
HELLO: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": "hi"}],
}
THOUGHT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "yes"}]},
        {"role": "user", "content": "why?"},
    ]
}
SWITCHED: dict[str, dict[str, Any]] = {
    "on": HELLO | {"thinking": {"type": "adaptive"}},
    "off": HELLO | {"thinking": {"type": "disabled"}},
    "effort": HELLO | {"output_config": {"effort": "xhigh"}},
}


def written(body: dict[str, Any]) -> list[int]:
    """Return the tokens of a chat or a text in which everything that a template could write matters."""
    names = ("prompt", "messages", "tools", "chat_template_kwargs")
    return list(json.dumps({name: body.get(name) for name in names}, sort_keys=True).encode())


class ScriptedEngine(TokenEngine):
    """An engine without a render endpoint that makes chats of messages with these quirks."""

    def __init__(self, quirks: RenderQuirks) -> None:
        super().__init__()
        self.quirks = quirks
        self.tokens = written
        self.statuses = dict.fromkeys(ENGINES["vllm"].tokens.render_paths.values(), 404)

    def chat(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of a message."""
        request = read(MESSAGES_PATH, read_client_body(MESSAGES_PATH, msgspec.json.encode(body)))
        assert isinstance(request, TokenRequest)
        chat = chat_of(request, self.quirks)
        return written({name: chat.value(name) for name in chat.fields})

    def _answer(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == COUNT_PATH:
            return web.json_response({"input_tokens": len(self.chat(body))})
        return super()._answer(path, body)


def engine_of(kind: str, history: ThinkingHistory = THINK, switch: ThinkingSwitch = NO_SWITCH) -> ScriptedEngine:
    return ScriptedEngine(RenderQuirks(history=history, switch=switch, reading=ENGINES[kind].tokens.reading))


@asynccontextmanager
async def tokenizer_of(
    engines: Sequence[ScriptedEngine], renderers: Sequence[TokenEngine] = ()
) -> AsyncIterator[TextTokenizer]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for server in (*engines, *renderers):
            await stack.enter_async_context(server)
        rows = [Engine(engine.url, "1", ENGINES[engine.quirks.reading.name].tokens) for engine in engines]
        tokenizer = TextTokenizer(
            models=lambda: [MODEL],
            engines=lambda _: rows,
            session=session,
            engine_key=EngineKey(None, AllowList()),
            workers=lambda _: 1,
            local={},
            renderers=[RendererSpec(MODEL, renderer.url, None) for renderer in renderers],
            renderer_ways=RENDERER_WAYS,
            timeout_s=TIMEOUT_S,
            metrics=TokenMetrics(MetricRegistry()),
            clock=time.monotonic,
            rng=random.Random(1),
        )
        tokenizer.start()
        try:
            yield tokenizer
        finally:
            await tokenizer.stop()


async def prompt_of(tokenizer: TextTokenizer, body: dict[str, Any], path: str = MESSAGES_PATH) -> Prompt:
    return await tokenizer.prompt(path, MODEL, read_client_body(path, msgspec.json.encode(body)))


@pytest.mark.parametrize(
    "switch",
    [NO_SWITCH, ThinkingSwitch(("thinking",)), ThinkingSwitch(("reasoning_effort",), "medium", "none")],
    ids=["none", "argument", "effort"],
)
async def test_trials_find_what_sglang_makes_of_thinking(switch: ThinkingSwitch) -> None:
    engine = engine_of("sglang", switch=switch)
    async with tokenizer_of([engine]) as tokenizer:
        for body in (HELLO, THOUGHT, *SWITCHED.values()):
            prompt = await prompt_of(tokenizer, body)
            assert prompt.source == "tokenize" and prompt.token_ids is not None, prompt.problem
            assert prompt.token_ids.tolist() == engine.chat(body)
        assert tokenizer.health() == []


async def test_thinking_in_an_unknown_form_is_placed_by_load() -> None:
    engine = engine_of("sglang", history=ThinkingHistory(("<marks that no parser has>", "</marks that no parser has>")))
    async with tokenizer_of([engine]) as tokenizer:
        assert (await prompt_of(tokenizer, HELLO)).source == "tokenize"
        prompt = await prompt_of(tokenizer, THOUGHT)
        assert (prompt.source, prompt.reason) == ("none", "unverified")
        assert "message thinking" in prompt.problem
        assert "message with earlier thinking" in str(tokenizer.health())


async def test_vllm_is_not_queried_about_thinking() -> None:
    engine = engine_of("vllm")
    async with tokenizer_of([engine]) as tokenizer:
        prompt = await prompt_of(tokenizer, THOUGHT | {"thinking": {"type": "adaptive"}})
        assert prompt.token_ids is not None and prompt.token_ids.tolist() == engine.chat(THOUGHT)
        assert not any("thinking" in body or "output_config" in body for _, body in engine.asked)
        for name, reason in (("off", "not_looked_up"), ("effort", "unsupported")):
            assert (await prompt_of(tokenizer, SWITCHED[name])).reason == reason


async def test_engines_of_both_kinds_do_not_mix_their_prompts() -> None:
    async with tokenizer_of([engine_of("vllm"), engine_of("sglang")]) as tokenizer:
        prompt = await prompt_of(tokenizer, HELLO)
        assert (prompt.source, prompt.reason) == ("none", "unverified")
        assert "different kinds" in prompt.problem


async def test_responses_of_engines_of_both_kinds_are_placed_by_load() -> None:
    rendering = engine_of("vllm")
    rendering.statuses = {}
    async with tokenizer_of([rendering, engine_of("sglang")]) as tokenizer:
        prompt = await prompt_of(tokenizer, {"input": "hi"}, RESPONSES_PATH)
        assert (prompt.source, prompt.reason) == ("none", "unverified")
        assert "different kinds" in prompt.problem


async def test_responses_of_sglang_are_no_fault_of_a_setting() -> None:
    async with tokenizer_of([engine_of("sglang")]) as tokenizer:
        for _ in range(COUNTED_MIN):
            prompt = await prompt_of(tokenizer, {"input": "hi"}, RESPONSES_PATH)
            assert (prompt.source, prompt.reason) == ("none", "not_looked_up") and "x-session-id" in prompt.problem
        assert not list(tokenizer.missing())
        (unread,) = tokenizer.unread_responses()
        assert not unread.can_render


async def test_a_renderer_of_vllm_makes_the_tokens_of_texts_alone_for_sglang() -> None:
    engine, renderer = engine_of("sglang"), TokenEngine()
    # It makes the engine's own tokens of the chats that are probed; that of a last answer differs.
    renderer.tokens = written
    async with tokenizer_of([engine], [renderer]) as tokenizer:
        chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]}
        assert (await prompt_of(tokenizer, chat, CHAT_PATH)).source == "tokenize"
        assert (await prompt_of(tokenizer, HELLO)).source == "tokenize"
        assert (await prompt_of(tokenizer, {"prompt": "a text"}, TEXT_PATH)).source == "render"
        assert not any("it is" in str(body) for _, body in renderer.asked)
        assert tokenizer.renderer_problems() == []
