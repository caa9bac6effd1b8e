# SPDX-License-Identifier: Apache-2.0
"""Tokens from text against a real HTTP server that answers as vLLM does, or slowly, wrongly, or not at all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from token_engine import TokenEngine, tokens_of

from kvrouter.router.common.errors import BadQuestion
from kvrouter.router.telemetry.metrics import Metrics
from kvrouter.router.tokens import tokenizer as module
from kvrouter.router.tokens.engine import verified_engines as judged_engines
from kvrouter.router.tokens.engine.client import ASKS_PER_ENGINE, Engine
from kvrouter.router.tokens.engine.verification import LocalMaker
from kvrouter.router.tokens.engine.wire import RenderQuirks
from kvrouter.router.tokens.prompt_tokens import Prompt, TokensUnknown
from kvrouter.router.tokens.token_request import CHAT_PATH, TEXT_PATH, TokenRequest
from kvrouter.router.tokens.tokenizer import TextTokenizer

MODEL = "m"
# Nothing here waits this long unless it fails.
PATIENCE_S = 20.0
CHAT = {"messages": [{"role": "user", "content": "Hi 🙂"}]}
RENDER_CHAT = "/v1/chat/completions/render"
RENDER_TEXT = "/v1/completions/render"
NO_RENDER = {RENDER_CHAT: 403, RENDER_TEXT: 403}


class Here:
    """A tokenizer that makes what the scripted engine makes; `wrong` of these features not."""

    held_bytes = 0

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.made = 0

    def ids(self, asked: TokenRequest, habits: RenderQuirks) -> NDArray[np.int64]:
        self.made += 1
        if asked.kind == "responses" or asked.has("chat_template"):
            raise TokensUnknown("unsupported", "chat_template is not read here")
        body = {name: asked.value(name) for name in asked.fields}
        found = tokens_of(body, drop_tools=not habits.keeps_unused_tools)
        return np.array([7, *found] if self.wrong in asked.features else found, np.int64)

    def likely_habits(self) -> tuple[RenderQuirks, ...]:
        return (RenderQuirks(), RenderQuirks(keeps_unused_tools=False))


class Case:
    """Engines, a Tokenizing over them, and what it counted."""

    def __init__(self, tokenizing: TextTokenizer, engines: list[TokenEngine], metrics: Metrics) -> None:
        self.tokenizing = tokenizing
        self.engines = engines
        self.metrics = metrics
        self.lives = ["1"] * len(engines)

    async def chat(self, **changes: Any) -> Prompt:
        return await self.tokenizing.prompt(CHAT_PATH, MODEL, msgspec.json.encode(CHAT | changes))

    async def text(self, prompt: Any, **more: Any) -> Prompt:
        return await self.tokenizing.prompt(TEXT_PATH, MODEL, msgspec.json.encode({"prompt": prompt} | more))

    def asked(self, *paths: str) -> int:
        return sum(engine.paths().count(path) for engine in self.engines for path in paths)

    def counted(self, reason: str) -> float:
        return self.metrics.prompts_unknown.labels(reason)._value.get()


@asynccontextmanager
async def case(
    engines: int = 1, local: LocalMaker | None = None, timeout_s: float = PATIENCE_S, **settings: Any
) -> AsyncIterator[Case]:
    """settings: attributes of each engine."""
    metrics = Metrics(CollectorRegistry())
    running = [TokenEngine() for _ in range(engines)]
    async with aiohttp.ClientSession() as session:
        for engine in running:
            await engine.__aenter__()
            for name, value in settings.items():
                setattr(engine, name, value)
        local_makers: Mapping[str, LocalMaker] = {} if local is None else {MODEL: local}
        found: Case
        tokenizing = TextTokenizer(
            models=lambda: [MODEL],
            engines=lambda _: [Engine(e.url, life) for e, life in zip(found.engines, found.lives, strict=True)],
            session=session,
            local=local_makers,
            timeout_s=timeout_s,
            metrics=metrics,
            clock=time.monotonic,
            rng=random.Random(1),
        )
        found = Case(tokenizing, running, metrics)
        tokenizing.start()
        try:
            yield found
        finally:
            await tokenizing.stop()
            for engine in running:
                await engine.__aexit__()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * PATIENCE_S))


async def until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        await asyncio.sleep(0.01)


def ids(prompt: Prompt) -> list[int] | None:
    return None if prompt.token_ids is None else prompt.token_ids.tolist()


def test_an_engine_renders_a_chat_and_a_text() -> None:
    async def test() -> None:
        async with case() as it:
            prompt = await it.chat(temperature=0.5, stream=True, cache_salt="s", model="alias", max_tokens=3)
            assert (ids(prompt), prompt.source, prompt.problem) == (tokens_of(CHAT), "render", "")
            assert prompt.num_tokens == len(tokens_of(CHAT))
            # What the engine was asked with decides about tokens; not who asks nor how it is sampled.
            assert it.engines[0].asked[-1] == (RENDER_CHAT, {**CHAT, "mm_payload": "none"})
            prompt = await it.text("Hallo")
            assert (ids(prompt), prompt.source) == ([1, *b"Hallo"], "render")
            assert it.asked("/tokenize", CHAT_PATH, TEXT_PATH) == 0

    run(test())


def test_without_a_render_endpoint_tokenize_is_used_and_verified() -> None:
    async def test() -> None:
        async with case(statuses=NO_RENDER) as it:
            prompt = await it.chat()
            assert (ids(prompt), prompt.source) == (tokens_of(CHAT), "tokenize")
            assert it.tokenizing.status(MODEL, it.engines[0].url).way == "tokenize"
            assert it.tokenizing.health() == []
            # One run of each probe, for one token.
            runs = [body for path, body in it.engines[0].asked if path in (CHAT_PATH, TEXT_PATH)]
            assert len(runs) == 4 and all(body["max_tokens"] == 1 for body in runs)

    run(test())


def test_tokenize_that_differs_from_the_engine_is_not_used() -> None:
    async def test() -> None:
        def harmony(body: dict[str, Any]) -> list[int]:
            return tokens_of(body) if "prompt" in body else [5, *tokens_of(body)]

        async with case(statuses=NO_RENDER, tokenize=harmony) as it:
            prompt = await it.chat()
            assert (ids(prompt), prompt.source, prompt.reason) == (None, "none", "unverified")
            assert "equal up to token 0" in prompt.problem
            assert ids(await it.text("x")) == [1, *b"x"]
            assert (
                "its /tokenize makes other tokens of a chat" in it.tokenizing.status(MODEL, it.engines[0].url).problem
            )
            assert any("other tokens" in problem for problem in it.tokenizing.health())
            await until(lambda: it.metrics.token_mismatches._value.get() == 1)

    run(test())


def test_an_engine_without_ids_is_verified_by_length() -> None:
    async def test() -> None:
        async with case(statuses=NO_RENDER, tells_ids=False) as it:
            assert (await it.chat()).source == "tokenize"
        async with case(statuses=NO_RENDER, tells_ids=False, tokenize=lambda body: [5, *tokens_of(body)]) as it:
            assert (await it.chat()).reason == "unverified"

    run(test())


def test_tools_that_an_engine_leaves_out_are_left_out() -> None:
    async def test() -> None:
        def drops(body: dict[str, Any]) -> list[int]:
            return tokens_of(body, drop_tools=True)

        tools = [{"type": "function", "function": {"name": "f"}}]
        async with case(statuses=NO_RENDER, tokens=drops, tokenize=tokens_of) as it:
            body = CHAT | {"tools": tools, "tool_choice": "none"}
            assert ids(await it.chat(tools=tools, tool_choice="none")) == drops(body) == tokens_of(CHAT)
            assert ids(await it.chat(tools=tools)) == tokens_of(CHAT | {"tools": tools})
        async with case(tokens=drops, local=Here()) as it:
            prompt = await it.chat(tools=tools, tool_choice="none")
            assert (ids(prompt), prompt.source) == (tokens_of(CHAT), "local")

    run(test())


def test_a_local_tokenizer_that_agrees_is_used() -> None:
    async def test() -> None:
        async with case(local=Here()) as it:
            prompt = await it.chat()
            assert (ids(prompt), prompt.source) == (tokens_of(CHAT), "local")
            assert it.tokenizing.status(MODEL, it.engines[0].url).way == "local"
            # What it does not read goes to the engine.
            assert (await it.chat(chat_template="x")).source == "render"

    run(test())


@pytest.mark.parametrize(("wrong", "way"), [("chat", "chat"), ("tools", "chat with tools"), ("text", "text")])
def test_a_local_tokenizer_that_differs_is_reported_and_not_used(wrong: str, way: str) -> None:
    async def test() -> None:
        async with case(local=Here(wrong)) as it:
            # Judged when it is known, not when it is first asked.
            await until(it.tokenizing.health)
            assert [
                f"the tokenizer here makes other tokens of a {way}" in problem for problem in it.tokenizing.health()
            ] == [True] * len(it.tokenizing.health())
            await until(lambda: it.metrics.token_mismatches._value.get() == 1)
            assert (await it.text("a")).source == ("render" if wrong == "text" else "local")
            prompt = await it.chat(tools=[{"type": "function", "function": {"name": "f"}}])
            assert prompt.source == ("local" if wrong == "text" else "render")

    run(test())


def test_a_restarted_engine_is_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_engines, "MIN_JUDGE_INTERVAL_S", 0.0)

    async def test() -> None:
        async with case(local=Here()) as it:
            assert (await it.chat()).source == "local"
            it.engines[0].tokens = lambda body: [9, *tokens_of(body)]
            it.lives[0] = "2"
            await until(it.tokenizing.health)
            prompt = await it.chat()
            assert (ids(prompt), prompt.source) == ([9, *tokens_of(CHAT)], "render")

    run(test())


def test_tokens_are_cached_and_requested_once() -> None:
    async def test() -> None:
        async with case(delay_s=0.05) as it:
            prompts = await asyncio.gather(*(it.chat(seed=number) for number in range(20)))
            assert all(ids(prompt) == tokens_of(CHAT) for prompt in prompts)
            assert ids(await it.chat(user="another")) == tokens_of(CHAT)
            probes = sum(
                path == RENDER_CHAT and body["messages"] != CHAT["messages"] for path, body in it.engines[0].asked
            )
            assert it.asked(RENDER_CHAT) - probes == 1
            assert it.metrics.prompt_memory_hits._value.get() == 1
            # What decides about tokens is not shared.
            assert (await it.chat(add_generation_prompt=False)).source == "render"
            assert it.asked(RENDER_CHAT) - probes == 2

    run(test())


@pytest.mark.slow
def test_a_slow_engine_costs_the_deadline_and_no_more() -> None:
    async def test() -> None:
        async with case(timeout_s=0.3) as it:
            await it.chat()
            it.engines[0].delay_s = PATIENCE_S
            prompt = await it.text("a" * 400)
            assert (prompt.source, prompt.reason, prompt.token_ids) == ("none", "timeout", None)
            assert prompt.num_tokens == pytest.approx(100, abs=20)
            assert "tokenize_timeout_s" in prompt.problem
            assert it.counted("timeout") == 1

    run(test())


def test_requests_to_one_engine_are_bounded() -> None:
    async def test() -> None:
        async with case() as it:
            await it.text("first")
            it.engines[0].delay_s = 0.02
            it.engines[0].most_at_once = 0
            prompts = await asyncio.gather(*(it.text(f"prompt {number}") for number in range(5 * ASKS_PER_ENGINE)))
            assert all(prompt.source == "render" for prompt in prompts)
            assert it.engines[0].most_at_once == ASKS_PER_ENGINE

    run(test())


def test_requests_beyond_the_queue_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)

    async def test() -> None:
        async with case() as it:
            await it.text("first")
            it.engines[0].delay_s = 0.2
            prompts = await asyncio.gather(*(it.text(f"prompt {number}") for number in range(8)))
            assert [prompt.reason for prompt in prompts] == [None] * 3 + ["busy"] * 5

    run(test())


def test_another_engine_tokenizes_if_one_fails() -> None:
    async def test() -> None:
        async with case(engines=2) as it:
            await it.chat()
            await until(lambda: all(it.tokenizing.status(MODEL, engine.url).way == "render" for engine in it.engines))
            it.engines[0].statuses = {RENDER_TEXT: 500}
            for number in range(8):
                assert (await it.text(f"prompt {number}")).source == "render"
            it.engines[1].statuses = {RENDER_TEXT: 503}
            prompt = await it.text("both")
            assert (prompt.source, prompt.reason) == ("none", "unreachable")

    run(test())


def test_a_prompt_that_breaks_a_rendering_engine_is_sent_to_no_other() -> None:
    async def test() -> None:
        async with case(engines=2) as it:
            await it.chat()
            await until(lambda: all(it.tokenizing.status(MODEL, engine.url).way == "render" for engine in it.engines))
            for engine in it.engines:
                engine.dies_of = "poison"
            prompt = await it.text("poison")
            assert (prompt.source, prompt.reason, prompt.broke_engine) == ("none", "unreachable", True)
            assert sum("poison" in str(body) for engine in it.engines for _, body in engine.asked) == 1
            prompt = await it.chat(messages=[{"role": "user", "content": [{"type": "image_url"}, "poison"]}])
            assert prompt.broke_engine
            assert sum("poison" in str(body) for engine in it.engines for _, body in engine.asked) == 2
            # One that cannot be reached was not broken by it.
            await it.engines[0].__aexit__()
            await it.engines[1].__aexit__()
            prompt = await it.text("harmless")
            assert (prompt.reason, prompt.broke_engine) == ("unreachable", False)

    run(test())


def test_engines_that_make_different_tokens_are_named() -> None:
    async def test() -> None:
        async with case(engines=2) as it:
            it.engines[1].tokens = lambda body: [4, *tokens_of(body)]
            await it.chat()
            await until(it.tokenizing.health)
            assert "different tokens of one text" in it.tokenizing.health()[0]
            assert not (await it.chat()).replaces
        async with case(engines=2) as it:
            await it.chat()
            await until(lambda: all(it.tokenizing.status(MODEL, engine.url).way == "render" for engine in it.engines))
            assert it.tokenizing.health() == []
            assert (await it.chat()).replaces

    run(test())


def test_a_prompt_that_the_engine_rejects_is_refused() -> None:
    async def test() -> None:
        async with case() as it:
            await it.chat()
            it.engines[0].statuses = {RENDER_CHAT: 400}
            prompt = await it.chat(tools=[])
            assert (prompt.refused, prompt.reason, prompt.problem) == (True, "refused", f"{RENDER_CHAT} says no")

    run(test())


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
def test_an_answer_without_tokens_is_no_tokens(answer: bytes) -> None:
    async def test() -> None:
        async with case() as it:
            await it.text("first")
            it.engines[0].answers = {RENDER_CHAT: answer, RENDER_TEXT: answer}
            for prompt in (await it.chat(), await it.text("a")):
                assert (prompt.source, prompt.reason) == ("none", "unreachable")

    run(test())


def test_an_answer_too_long_to_be_tokens_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.router.tokens.engine.client.ANSWER_BYTES", 10_000)

    async def test() -> None:
        async with case() as it:
            await it.text("first")
            it.engines[0].tokens = lambda _: [1] * 100_000
            prompt = await it.text("a")
            assert (prompt.source, prompt.reason) == ("none", "unreachable")
            assert "more than" in prompt.problem

    run(test())


def test_an_engine_without_token_endpoints_is_reported() -> None:
    async def test() -> None:
        everything = {RENDER_CHAT: 404, RENDER_TEXT: 404, "/tokenize": 404, CHAT_PATH: 404, TEXT_PATH: 404}
        async with case(statuses=everything) as it:
            prompt = await it.chat()
            assert (prompt.source, prompt.reason) == ("none", "unverified")
            assert it.tokenizing.health() == []
        async with case(engines=0) as it:
            prompt = await it.chat()
            assert (prompt.source, prompt.reason) == ("none", "no_engine")
        async with case(engines=0, local=Here()) as it:
            assert (await it.chat()).source == "local"
            assert "not verified against any engine" in it.tokenizing.health()[0]

    run(test())


def test_an_engine_that_wants_a_key_gets_the_clients() -> None:
    async def test() -> None:
        async with case() as it:
            await it.tokenizing.prompt(CHAT_PATH, MODEL, msgspec.json.encode(CHAT), authorization="Bearer k")
            assert it.engines[0].headers[-1]["authorization"] == "Bearer k"

    run(test())


def test_images_are_known_up_to_the_first() -> None:
    async def test() -> None:
        before = [{"role": "system", "content": "long ago " * 9}, {"role": "user", "content": "look:"}]
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
        async with case() as it:
            prompt = await it.chat(messages=[*before, picture, {"role": "user", "content": "what?"}])
            whole = tokens_of({"messages": before, "continue_final_message": True})
            known = ids(prompt)
            assert known is not None and prompt.known_tokens == len(known)
            assert (prompt.reason, prompt.source) == ("media", "render")
            # The next message's role is known too, less one token.
            assert known == [*whole, *b"user"]
            assert prompt.num_tokens > len(known)

    run(test())


def test_an_engine_that_returns_its_items_makes_all_tokens_known() -> None:
    async def test() -> None:
        part = {"type": "image_url", "image_url": {"url": "data:,x"}}
        picture = {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}
        async with case() as it:
            engine = it.engines[0]
            engine.tokens = lambda body: [5] * 40 if "image_url" in str(body) else tokens_of(body)
            engine.features = {
                "mm_hashes": {"image": ["b", "a"]},
                "mm_placeholders": {"image": [{"offset": 30, "length": 2}, {"offset": 4, "length": 20}]},
            }
            for asked in (1, 1):
                prompt = await it.chat(messages=[picture])
                assert (ids(prompt), prompt.reason, prompt.source) == ([5] * 40, None, "render")
                assert prompt.known_tokens is None and prompt.num_tokens == 40
                assert prompt.items == prompt.question(MODEL).items == (("a", 4, 20), ("b", 30, 2))
                bodies = [body for path, body in engine.asked if path == RENDER_CHAT and "image_url" in str(body)]
                # Remembered; and the pictures themselves are not sent back.
                assert len(bodies) == asked and bodies[0]["mm_payload"] == "none"
            tools = {"mm_hashes": {"image": ["c"]}, "mm_placeholders": {"image": [{"offset": 39, "length": 2}]}}
            for wrong in (None, {}, {"mm_hashes": {"image": ["c"]}, "mm_placeholders": {"audio": []}}, tools):
                engine.features = wrong
                prompt = await it.chat(messages=[picture, {"role": "user", "content": repr(wrong)}])
                assert (prompt.reason, prompt.items) == ("media", ())

    run(test())


@pytest.mark.slow
def test_an_engine_slow_with_pictures_leaves_time_for_the_text_before_them() -> None:
    async def test() -> None:
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
        async with case() as it:
            it.engines[0].slow = "image_url"
            it.engines[0].features = {
                "mm_hashes": {"image": ["a"]},
                "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
            }
            chat = [{"role": "system", "content": "long ago"}, picture]
            prompt = await it.chat(messages=chat)
            assert prompt.reason == "media" and ids(prompt)
            it.engines[0].go_on.set()
            # What came too late is known the next time.
            while not (prompt := await it.chat(messages=chat)).items:
                await asyncio.sleep(0.01)
            assert prompt.reason is None

    run(test())


def test_a_picture_is_not_counted_by_its_bytes_nor_its_stand_in_held_against_the_client() -> None:
    async def test() -> None:
        part = {"type": "image_url", "image_url": {"url": "data:," + "x" * 500_000}}
        body = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        async with case() as it:
            assert (await it.chat(messages=body)).num_tokens < 5_000
            it.engines[0].statuses = {RENDER_CHAT: 400}
            prompt = await it.chat(messages=[{"role": "system", "content": "a"}, *body])
            assert (prompt.reason, prompt.refused, prompt.source) == ("media", False, "none")
            assert prompt.num_tokens < 5_000

    run(test())


def test_responses_are_always_rendered() -> None:
    async def test() -> None:
        async with case(local=Here()) as it:
            it.engines[0].tokens = lambda body: [6] if "input" in body else tokens_of(body)
            prompt = await it.tokenizing.prompt("/v1/responses", MODEL, msgspec.json.encode({"input": "Hi"}))
            assert (ids(prompt), prompt.source) == ([6], "render")

    run(test())


def test_ids_of_the_client_are_used_unchanged() -> None:
    async def test() -> None:
        async with case() as it:
            assert ids(await it.text([3, 4, 5])) == [3, 4, 5]
            assert ids(await it.text([[3, 4], [5]])) == [3, 4]
            assert ids(await it.text(["a", "b"])) == [1, *b"a"]
            given = await it.chat(kv_transfer_params={"prompt_token_ids": [8, 9]})
            assert (ids(given), given.source) == ([8, 9], "given")
            assert it.asked(RENDER_CHAT, "/tokenize") == 3  # probes

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (TEXT_PATH, {"prompt": "a", "prompt_embeds": "AAAA"}, "embeds"),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "unsupported"),
        ("/v1/embeddings", {"input": "a"}, "unsupported"),
        ("/v1/audio/speech", {"input": "a"}, "unsupported"),
    ],
)
def test_a_request_without_tokens_says_why(path: str, body: dict[str, Any], reason: str) -> None:
    async def test() -> None:
        async with case() as it:
            prompt = await it.tokenizing.prompt(path, MODEL, msgspec.json.encode(body))
            assert (prompt.source, prompt.reason, prompt.token_ids) == ("none", reason, None)
            assert prompt.problem and it.counted(reason) == 1

    run(test())


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (CHAT_PATH, b"x"),
        (CHAT_PATH, b"[]"),
        (CHAT_PATH, b"{}"),
        (CHAT_PATH, b'{"messages": []}'),
        (CHAT_PATH, b'{"messages": ["a"]}'),
        (CHAT_PATH, b'{"messages": {"role": "user"}}'),
        (TEXT_PATH, b"{}"),
        (TEXT_PATH, b'{"prompt": null}'),
        (TEXT_PATH, b'{"prompt": []}'),
        (TEXT_PATH, b'{"prompt": 3}'),
        (TEXT_PATH, b'{"prompt": [[["a"]]]}'),
        (TEXT_PATH, b'{"prompt": [-3]}'),
    ],
)
def test_a_body_that_cannot_be_read_is_the_clients_fault(path: str, raw: bytes) -> None:
    async def test() -> None:
        async with case() as it:
            with pytest.raises(BadQuestion):
                await it.tokenizing.prompt(path, MODEL, raw)

    run(test())


def test_long_bodies_do_not_hold_the_loop_and_are_the_same() -> None:
    async def test() -> None:
        async with case(local=Here()) as it:
            long = "word " * 40_000
            prompt = await it.chat(messages=[{"role": "user", "content": long}])
            assert ids(prompt) == tokens_of({"messages": [{"role": "user", "content": long}]})

    run(test())
