# SPDX-License-Identifier: Apache-2.0
"""Engines that answer text slowly, wrongly or not at all: bounds, deadlines and reasons. Requests go over real HTTP."""

from __future__ import annotations

import asyncio

import pytest

from kvrouter.router.route.tokens import tokenizer as module
from kvrouter.router.route.tokens.engine.client import ASKS_PER_ENGINE
from tests.support.tokenizer_stage import MODEL, PATIENCE_S, RENDER_CHAT, RENDER_TEXT, case, until


@pytest.mark.slow
async def test_a_slow_engine_costs_the_deadline_and_no_more() -> None:
    async with case(timeout_s=0.3) as stage:
        # On a busy machine the first request may need more than one deadline.
        while (await stage.chat()).reason == "timeout":
            pass
        before = stage.counted("timeout")
        stage.engines[0].delay_s = PATIENCE_S
        prompt = await stage.text("a" * 400)
        assert (prompt.source, prompt.reason, prompt.token_ids) == ("none", "timeout", None)
        assert prompt.num_tokens == pytest.approx(100, abs=20)
        assert "tokenize_timeout_s" in prompt.problem
        assert stage.counted("timeout") == before + 1


async def test_requests_to_one_engine_are_bounded() -> None:
    async with case() as stage:
        await stage.text("first")
        stage.engines[0].delay_s = 0.02
        stage.engines[0].most_at_once = 0
        prompts = await asyncio.gather(*(stage.text(f"prompt {number}") for number in range(5 * ASKS_PER_ENGINE)))
        assert all(prompt.source == "render" for prompt in prompts)
        assert stage.engines[0].most_at_once == ASKS_PER_ENGINE


async def test_requests_beyond_the_queue_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    async with case() as stage:
        await stage.text("first")
        stage.engines[0].delay_s = 0.2
        prompts = await asyncio.gather(*(stage.text(f"prompt {number}") for number in range(8)))
        assert [prompt.reason for prompt in prompts] == [None] * 3 + ["busy"] * 5


async def test_another_engine_tokenizes_if_one_fails() -> None:
    async with case(engines=2) as stage:
        await stage.chat()
        await until(lambda: all(stage.tokenizing.status(MODEL, engine.url).way == "render" for engine in stage.engines))
        stage.engines[0].statuses = {RENDER_TEXT: 500}
        for number in range(8):
            assert (await stage.text(f"prompt {number}")).source == "render"
        stage.engines[1].statuses = {RENDER_TEXT: 503}
        prompt = await stage.text("both")
        assert (prompt.source, prompt.reason) == ("none", "unreachable")


async def test_a_prompt_that_breaks_a_rendering_engine_is_sent_to_no_other() -> None:
    async with case(engines=2) as stage:
        await stage.chat()
        await until(lambda: all(stage.tokenizing.status(MODEL, engine.url).way == "render" for engine in stage.engines))
        for engine in stage.engines:
            engine.dies_of = "poison"
        prompt = await stage.text("poison")
        assert (prompt.source, prompt.reason, prompt.broke_engine) == ("none", "unreachable", True)
        assert sum("poison" in str(body) for engine in stage.engines for _, body in engine.asked) == 1
        prompt = await stage.chat(messages=[{"role": "user", "content": [{"type": "image_url"}, "poison"]}])
        assert prompt.broke_engine
        assert sum("poison" in str(body) for engine in stage.engines for _, body in engine.asked) == 2
        # An engine that cannot be reached was not broken by the prompt.
        await stage.engines[0].__aexit__()
        await stage.engines[1].__aexit__()
        prompt = await stage.text("harmless")
        assert (prompt.reason, prompt.broke_engine) == ("unreachable", False)


async def test_a_prompt_that_the_engine_rejects_is_refused() -> None:
    async with case() as stage:
        await stage.chat()
        stage.engines[0].statuses = {RENDER_CHAT: 400}
        prompt = await stage.chat(tools=[])
        assert (prompt.refused, prompt.reason, prompt.problem) == (True, "refused", f"{RENDER_CHAT} says no")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"token_ids": []}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": ["a"]}',
        b"[" * 9999,
    ],
)
async def test_an_answer_without_tokens_is_no_tokens(answer: bytes) -> None:
    async with case() as stage:
        await stage.text("first")
        stage.engines[0].answers = {RENDER_CHAT: answer, RENDER_TEXT: answer}
        for prompt in (await stage.chat(), await stage.text("a")):
            assert (prompt.source, prompt.reason) == ("none", "unreachable")


async def test_an_answer_too_long_to_be_tokens_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.router.route.tokens.engine.client.ANSWER_BYTES", 10_000)
    async with case() as stage:
        await stage.text("first")
        stage.engines[0].tokens = lambda _: [1] * 100_000
        prompt = await stage.text("a")
        assert (prompt.source, prompt.reason) == ("none", "unreachable")
        assert "more than" in prompt.problem
