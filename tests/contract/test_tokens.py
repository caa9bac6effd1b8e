# SPDX-License-Identifier: Apache-2.0
"""The choice of the engine or tokenizer that makes the tokens of a text, and its verification.

Real HTTP servers answer as vLLM does.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrouter.router.route.tokens import tokenizer
from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH
from kvrouter.router.route.tokens.engine import verified_engines as judged_engines
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, tokenize_body
from kvrouter.router.route.tokens.token_request import TokenRequest
from kvrouter.router.route.tokens.unknown_prompts import COUNTED_MIN
from tests.support.token_engine import tokens_of
from tests.support.tokenizer_stage import CHAT, MODEL, NO_RENDER, RENDER_CHAT, RENDER_TEXT, Here, case, ids, until


async def test_an_engine_renders_a_chat_and_a_text() -> None:
    async with case() as stage:
        prompt = await stage.chat(temperature=0.5, stream=True, cache_salt="s", model="alias", max_tokens=3)
        assert (ids(prompt), prompt.source, prompt.problem) == (tokens_of(CHAT), "render", "")
        assert prompt.num_tokens == len(tokens_of(CHAT))
        # Only fields that decide the tokens are sent, not those about the sender or the sampling.
        assert stage.engines[0].asked[-1] == (RENDER_CHAT, {**CHAT, "mm_payload": "none"})
        prompt = await stage.text("Hallo")
        assert (ids(prompt), prompt.source) == ([1, *b"Hallo"], "render")
        assert stage.asked("/tokenize", CHAT_PATH, TEXT_PATH) == 0


async def test_without_a_render_endpoint_tokenize_is_used_and_verified() -> None:
    async with case(statuses=NO_RENDER) as stage:
        prompt = await stage.chat()
        assert (ids(prompt), prompt.source) == (tokens_of(CHAT), "tokenize")
        assert stage.tokenizing.status(MODEL, stage.engines[0].url).way == "tokenize"
        assert stage.tokenizing.health() == []
        # Each probe runs once, for one token.
        runs = [body for path, body in stage.engines[0].asked if path in (CHAT_PATH, TEXT_PATH)]
        assert len(runs) == 4 and all(body["max_tokens"] == 1 for body in runs)


async def test_tokenize_that_differs_from_the_engine_is_not_used() -> None:
    def harmony(body: dict[str, Any]) -> list[int]:
        return tokens_of(body) if "prompt" in body else [5, *tokens_of(body)]

    async with case(statuses=NO_RENDER, tokenize=harmony) as stage:
        prompt = await stage.chat()
        assert (ids(prompt), prompt.source, prompt.reason) == (None, "none", "unverified")
        assert "equal up to token 0" in prompt.problem
        assert ids(await stage.text("x")) == [1, *b"x"]
        assert (
            "its /tokenize makes other tokens of a chat" in stage.tokenizing.status(MODEL, stage.engines[0].url).problem
        )
        assert any("other tokens" in problem for problem in stage.tokenizing.health())
        await until(lambda: stage.shown(stage.metrics.mismatches) == 1)


async def test_an_engine_without_ids_is_verified_by_length() -> None:
    async with case(statuses=NO_RENDER, tells_ids=False) as stage:
        assert (await stage.chat()).source == "tokenize"
    async with case(statuses=NO_RENDER, tells_ids=False, tokenize=lambda body: [5, *tokens_of(body)]) as stage:
        assert (await stage.chat()).reason == "unverified"


async def test_tools_that_an_engine_leaves_out_are_left_out() -> None:
    def drops(body: dict[str, Any]) -> list[int]:
        return tokens_of(body, drop_tools=True)

    tools = [{"type": "function", "function": {"name": "f"}}]
    async with case(statuses=NO_RENDER, tokens=drops, tokenize=tokens_of) as stage:
        body = CHAT | {"tools": tools, "tool_choice": "none"}
        assert ids(await stage.chat(tools=tools, tool_choice="none")) == drops(body) == tokens_of(CHAT)
        assert ids(await stage.chat(tools=tools)) == tokens_of(CHAT | {"tools": tools})
    async with case(tokens=drops, local=Here()) as stage:
        prompt = await stage.chat(tools=tools, tool_choice="none")
        assert (ids(prompt), prompt.source) == (tokens_of(CHAT), "local")


async def test_a_local_tokenizer_that_agrees_is_used() -> None:
    async with case(local=Here()) as stage:
        prompt = await stage.chat()
        assert (ids(prompt), prompt.source) == (tokens_of(CHAT), "local")
        assert stage.tokenizing.status(MODEL, stage.engines[0].url).way == "local"
        # A request that the local tokenizer does not read goes to the engine.
        assert (await stage.chat(chat_template="x")).source == "render"


@pytest.mark.parametrize(("wrong", "way"), [("chat", "chat"), ("tools", "chat with tools"), ("text", "text")])
async def test_a_local_tokenizer_that_differs_is_reported_and_not_used(wrong: str, way: str) -> None:
    async with case(local=Here(wrong)) as stage:
        # The tokenizer is judged when it becomes known, not when it is first used.
        await until(stage.tokenizing.health)
        assert [
            f"the tokenizer here makes other tokens of a {way}" in problem for problem in stage.tokenizing.health()
        ] == [True] * len(stage.tokenizing.health())
        await until(lambda: stage.shown(stage.metrics.mismatches) == 1)
        assert (await stage.text("a")).source == ("render" if wrong == "text" else "local")
        prompt = await stage.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        assert prompt.source == ("local" if wrong == "text" else "render")


async def test_other_work_goes_on_while_a_local_tokenizer_is_verified() -> None:
    turns = 0
    at_turns = set()

    class Noting(Here):
        def ids(self, request: TokenRequest, quirks: RenderQuirks) -> NDArray[np.int64]:
            at_turns.add(turns)
            return super().ids(request, quirks)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with case(local=Noting()) as stage:
        taking = asyncio.create_task(take_turns())
        await until(lambda: stage.tokenizing.status(MODEL, stage.engines[0].url).way == "local")
        taking.cancel()
    assert len(at_turns) == len(Here().likely_quirks())


async def test_a_long_body_for_an_engine_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noting(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return tokenize_body(*arguments)

    monkeypatch.setattr(tokenizer, "tokenize_body", noting)
    async with case(statuses=NO_RENDER) as stage:
        for size in (10, tokenizer.READ_BYTES):
            assert (await stage.text("a" * size)).source == "tokenize"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_a_restarted_engine_is_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_engines, "MIN_JUDGE_INTERVAL_S", 0.0)
    async with case(local=Here()) as stage:
        assert (await stage.chat()).source == "local"
        stage.engines[0].tokens = lambda body: [9, *tokens_of(body)]
        stage.lives[0] = "2"
        await until(stage.tokenizing.health)
        prompt = await stage.chat()
        assert (ids(prompt), prompt.source) == ([9, *tokens_of(CHAT)], "render")


async def test_tokens_are_cached_and_requested_once() -> None:
    async with case(delay_s=0.05) as stage:
        prompts = await asyncio.gather(*(stage.chat(seed=number) for number in range(20)))
        assert all(ids(prompt) == tokens_of(CHAT) for prompt in prompts)
        assert ids(await stage.chat(user="another")) == tokens_of(CHAT)
        probes = sum(
            path == RENDER_CHAT and body["messages"] != CHAT["messages"] for path, body in stage.engines[0].asked
        )
        assert stage.asked(RENDER_CHAT) - probes == 1
        assert stage.metrics.memory_hits.labels().value == 1
        # Requests that differ in a field that decides the tokens do not share them.
        assert (await stage.chat(add_generation_prompt=False)).source == "render"
        assert stage.asked(RENDER_CHAT) - probes == 2


async def test_engines_that_make_different_tokens_are_named() -> None:
    async with case(engines=2) as stage:
        stage.engines[1].tokens = lambda body: [4, *tokens_of(body)]
        await stage.chat()
        await until(stage.tokenizing.health)
        assert "different tokens of one text" in stage.tokenizing.health()[0]
        assert not (await stage.chat()).replaces
    async with case(engines=2) as stage:
        await stage.chat()
        await until(lambda: all(stage.tokenizing.status(MODEL, engine.url).way == "render" for engine in stage.engines))
        assert stage.tokenizing.health() == []
        assert (await stage.chat()).replaces


async def test_an_engine_without_token_endpoints_is_reported() -> None:
    everything = {RENDER_CHAT: 404, RENDER_TEXT: 404, "/tokenize": 404, CHAT_PATH: 404, TEXT_PATH: 404}
    async with case(statuses=everything) as stage:
        prompt = await stage.chat()
        assert (prompt.source, prompt.reason) == ("none", "unverified")
        assert stage.tokenizing.health() == []
    async with case(engines=0) as stage:
        prompt = await stage.chat()
        assert (prompt.source, prompt.reason) == ("none", "no_engine")
        assert "has a url is up" in prompt.problem
    async with case(engines=0, local=Here()) as stage:
        assert (await stage.chat()).source == "local"
        assert "not verified against any engine" in stage.tokenizing.health()[0]


async def test_a_draining_engine_is_queried_only_if_no_other_can_answer() -> None:
    async with case(engines=2) as stage:
        await stage.chat()
        await until(lambda: all(stage.tokenizing.status(MODEL, engine.url).way == "render" for engine in stage.engines))
        stage.drains[0] = True
        for number in range(12):
            assert (await stage.text(f"text {number}")).source == "render"
        assert not [body for _, body in stage.engines[0].asked if "text " in str(body)]
        stage.drains[1] = True
        assert (await stage.text("both drain")).source == "render"


async def test_texts_without_tokens_are_no_problem_once_their_engine_is_verified() -> None:
    async with case(statuses={RENDER_CHAT: 500, RENDER_TEXT: 500}) as stage:
        for number in range(COUNTED_MIN):
            assert (await stage.text(f"text {number}")).reason == "unreachable"
        assert list(stage.tokenizing.missing()) and "had no tokens" in str(stage.tokenizing.health())
        stage.engines[0].statuses = {}
        await until(lambda: not list(stage.tokenizing.missing()))
        assert stage.tokenizing.health() == []


async def test_texts_without_a_source_are_no_problem_once_the_engine_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_engines, "MIN_JUDGE_INTERVAL_S", 0.0)
    nothing = {RENDER_CHAT: 404, RENDER_TEXT: 404, "/tokenize": 404}
    async with case(statuses=nothing) as stage:
        for number in range(COUNTED_MIN):
            assert (await stage.text(f"text {number}")).reason == "unverified"
        # An engine that starts again without a source ends nothing.
        stage.lives[0] = "2"
        judged = stage.tokenizing._engines._judged[MODEL, stage.engines[0].url]
        await until(lambda: judged.life == "2")
        assert list(stage.tokenizing.missing())
        stage.engines[0].statuses = {}
        stage.lives[0] = "3"
        await until(lambda: not list(stage.tokenizing.missing()))
